"""Reads the inputs and outputs of a package of AOTInductor.

- The library has the nesting of arguments and results.
- The source of the library in the package checks types and sizes of the arguments. They are read from there.
- Types and sizes of results are not in the package, so the config must have them.
- If the package also has the program of torch.export, the program describes everything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace import DataType
from headrace_engines import GraphTensor
from headrace_torch.exported_program import describe_program
from headrace_torch.program_signature import SCALAR_TYPES, Leaf, ProgramSignature, argument_paths, result_names
from headrace_torch.program_sizes import Arithmetic
from headrace_torch.pt2_archive import Pt2Archive

#: C++ names of types whose names in Python are not the same in lower case.
_NAMES: Mapping[str, str] = {
    "kByte": "uint8",
    "kChar": "int8",
    "kShort": "int16",
    "kInt": "int32",
    "kLong": "int64",
    "kHalf": "float16",
    "kFloat": "float32",
    "kDouble": "float64",
}
_DATATYPES: Mapping[str, DataType | None] = dict(SCALAR_TYPES.values())
#: One line of the checks that AOTInductor writes into the source: the input, and the rule.
_CHECK = re.compile(
    r'"input_handles\[(?P<input>\d+)\]: (?P<what>unmatched dtype|unmatched dim value|unmatched stride value|'
    r"dim value is too small|dim value is too large)(?: at (?P<axis>\d+))?, \"\s*<<\s*\"expected(?: it)?(?: to be)?:?"
    r'(?: [<>]=)? ?(?:"\s*<<\s*\w+\s*<<\s*"\(at::(?P<type>\w+)\)|(?P<value>-?\d+))'
)


@dataclass
class _Input:
    """The checks of one input: fixed sizes and strides, and limits of others, by axis."""

    type: str = ""
    sizes: dict[int, int] = field(default_factory=dict)
    strides: dict[int, int] = field(default_factory=dict)
    least: dict[int, int] = field(default_factory=dict)
    most: dict[int, int] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        axes = {*self.sizes, *self.strides, *self.least, *self.most}
        return tuple(self.sizes.get(axis, -1) for axis in range(max(axes, default=-1) + 1))


def package_signature(
    archive: Pt2Archive, name: str, call_spec: tuple[str, str], count: int | None
) -> ProgramSignature:
    """Return the signature of the package ``name``, whose library has ``call_spec`` and takes ``count`` tensors.

    Raises `ValueError` for arguments that are no tensors, and for a memory layout that requests do not have."""
    if archive.programs:
        return describe_program(archive)
    takes, gives = (json.loads(text)[1] for text in call_spec)
    paths = [path for path, _ in argument_paths(takes, [])]
    if count is not None and len(paths) != count:
        raise ValueError(f"takes {len(paths)} arguments, of which {count} are tensors: compile it without the others")
    checks = _read_checks(archive, name)
    ranges: dict[str, tuple[int | None, int | None]] = {}
    inputs = []
    for index, path in enumerate(paths):
        checked = checks.get(index)
        if checked is None:
            inputs.append(Leaf(_unknown(f"INPUT__{index}"), path, is_known=False))
            continue
        _require_contiguous(index, checked)
        for axis in (axis for axis, size in enumerate(checked.shape) if size == -1):
            ranges[_symbol(index, axis)] = (checked.least.get(axis), checked.most.get(axis))
        type_name = _NAMES.get(checked.type, checked.type.removeprefix("k").lower())
        datatype = _DATATYPES.get(type_name)
        sizes = [Arithmetic(_symbol(index, axis)) if size == -1 else size for axis, size in enumerate(checked.shape)]
        inputs.append(Leaf(GraphTensor(f"INPUT__{index}", datatype, type_name, checked.shape), path, sizes))
    outputs = [Leaf(_unknown(own), path, is_known=False) for own, path in result_names(gives)]
    return ProgramSignature(inputs, outputs, ranges)


def _unknown(name: str) -> GraphTensor:
    return GraphTensor(name, None, "unknown", ())


def _symbol(index: int, axis: int) -> str:
    return f"input_{index}_axis_{axis}"


def _read_checks(archive: Pt2Archive, name: str) -> Mapping[int, _Input]:
    """Return the checks of each input from the source in the package; empty if there is none in the expected form."""
    found: dict[int, _Input] = {}
    for match in _matches(archive, name):
        checked = found.setdefault(int(match["input"]), _Input())
        if match["type"]:
            checked.type = match["type"]
        elif match["axis"]:
            kinds = {
                "unmatched dim value": checked.sizes,
                "unmatched stride value": checked.strides,
                "dim value is too small": checked.least,
                "dim value is too large": checked.most,
            }
            kinds[match["what"]][int(match["axis"])] = int(match["value"])
    return {index: checked for index, checked in found.items() if checked.type}


def _matches(archive: Pt2Archive, name: str) -> Iterator[re.Match[str]]:
    for record in archive.names(f"data/aotinductor/{name}/"):
        if record.endswith(".wrapper.cpp"):
            yield from _CHECK.finditer(archive.read(record).decode("latin-1"))


def _require_contiguous(index: int, checked: _Input) -> None:
    """Raise ValueError for strides that are not contiguous: the code would read outside of a request's tensor."""
    for axis, stride in checked.strides.items():
        inner: Sequence[int] = checked.shape[axis + 1 :]
        if -1 not in inner and stride != math.prod(inner):
            raise ValueError(
                f"was compiled for an input {index} of strides {list(checked.strides.values())}, and requests have "
                "contiguous tensors: compile it with contiguous examples"
            )
