"""Reads the inputs and outputs of a program of torch.export from its file: names, types, shapes, and allowed sizes.

Names are Triton's for packages of AOTInductor (docs/spec/behaviours.md section 10.3): ``INPUT__0``, or the path in the
call, ``ARGS[0]``, ``KWARGS[scale]``, ``RESULT[0]``, with another index or key per level of nesting. The name of an
argument, or the key of a dictionary of results, is valid, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace import DataType, dtypes
from headrace_engines import GraphTensor
from headrace_torch.program_sizes import Arithmetic

#: For each of PyTorch's numbers of data types: its name, and the protocol's data type or None.
SCALAR_TYPES: Mapping[int, tuple[str, DataType | None]] = {
    1: ("uint8", dtypes.UINT8),
    2: ("int8", dtypes.INT8),
    3: ("int16", dtypes.INT16),
    4: ("int32", dtypes.INT32),
    5: ("int64", dtypes.INT64),
    6: ("float16", dtypes.FP16),
    7: ("float32", dtypes.FP32),
    8: ("float64", dtypes.FP64),
    9: ("complex32", None),
    10: ("complex64", None),
    11: ("complex128", None),
    12: ("bool", dtypes.BOOL),
    13: ("bfloat16", dtypes.BF16),
    28: ("uint16", dtypes.UINT16),
    29: ("float8_e4m3fn", None),
    30: ("float8_e5m2", None),
    31: ("float8_e4m3fnuz", None),
    32: ("float8_e5m2fnuz", None),
    33: ("float8_e8m0fnu", None),
    34: ("uint32", dtypes.UINT32),
    35: ("uint64", dtypes.UINT64),
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One input or output tensor: its name, its ``path`` by Triton's convention, and its properties in the file.

    ``sizes`` has an `Arithmetic` for a variable size. ``guard`` is its name in conditions. ``is_known``: the file has
    its type and shape.
    """

    tensor: GraphTensor
    path: str
    sizes: Sequence[int | Arithmetic] = ()
    guard: str = ""
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class ProgramSignature:
    """``inputs`` and ``outputs`` in the order of the program's arguments and results.

    ``ranges`` has the smallest and the largest value of each symbol, None for no bound. ``conditions`` are about the
    sizes of all inputs.
    """

    inputs: Sequence[Leaf]
    outputs: Sequence[Leaf]
    ranges: Mapping[str, tuple[int | None, int | None]]
    conditions: Sequence[Arithmetic] = ()

    @property
    def most_rows(self) -> int | None:
        """The largest batch that all inputs take on their first axis; None for no bound."""
        bounds = [self._most(leaf.sizes[0]) for leaf in self.inputs if leaf.tensor.batches]
        return min((bound for bound in bounds if bound is not None), default=None)

    def _most(self, size: int | Arithmetic) -> int | None:
        if isinstance(size, int):
            return size
        most = {symbol: self.ranges.get(symbol, (None, None))[1] for symbol in size.symbols}
        known = {symbol: bound for symbol, bound in most.items() if bound is not None}
        return size.value(known) if len(known) == len(most) else None


# ---------------------------------------------------------------------- from the file


def read_signature(program: Mapping[str, Any]) -> ProgramSignature:
    """Return the signature in a program's JSON.

    Raises `TrustRequired` for sizes that are no arithmetic, and `ValueError`, `KeyError` or `TypeError` for a document
    that PyTorch does not write.
    """
    module = program["graph_module"]
    graph, signature = module["graph"], module["signature"]
    call = module["module_call_graph"][0]["signature"] if module["module_call_graph"] else None
    arguments = [spec["user_input"]["arg"] for spec in signature["input_specs"] if "user_input" in spec]
    results = [
        spec[kind]["arg"]
        for spec in signature["output_specs"]
        for kind in ("user_output", "loss_output")
        if kind in spec
    ]
    is_user = [spec.keys() & {"user_input", "constant_input"} for spec in signature["input_specs"]]
    places = [
        bool(spec.get("user_input")) for spec, user in zip(signature["input_specs"], is_user, strict=True) if user
    ]
    paths = _input_paths(call, len(places))
    inputs = [
        _leaf(graph, argument, f"INPUT__{index}", path, guard)
        for index, (argument, (path, guard)) in enumerate(
            zip(arguments, [path for path, is_given in zip(paths, places, strict=True) if is_given], strict=True)
        )
    ]
    outputs = [
        _leaf(graph, argument, name, path)
        for argument, (name, path) in zip(results, _output_names(call, len(results)), strict=True)
    ]
    ranges = {
        name: (_bound(bounds["min_val"]), _bound(bounds["max_val"]))
        for name, bounds in program["range_constraints"].items()
    }
    return ProgramSignature(inputs, outputs, ranges, [Arithmetic(text) for text in program.get("guards_code", ())])


def _leaf(graph: Mapping[str, Any], argument: Mapping[str, Any], name: str, path: str, guard: str = "") -> Leaf:
    ((kind, content),) = argument.items()
    if kind in _NO_TENSORS:
        return Leaf(GraphTensor(name, None, _NO_TENSORS[kind], (), is_tensor=False), path)
    if kind != "as_tensor":
        raise ValueError(f"an argument or result is of the type '{kind}'")
    own = content["name"] if guard and content["name"].isidentifier() else name
    meta = graph["tensor_values"][content["name"]]
    type_name, datatype = SCALAR_TYPES[meta["dtype"]]
    sizes = [size["as_int"] if "as_int" in size else size["as_expr"]["expr_str"] for size in meta["sizes"]]
    shape = tuple(size if type(size) is int else -1 for size in sizes)
    parsed = [size if type(size) is int else Arithmetic(size) for size in sizes] if guard else []
    return Leaf(GraphTensor(own, datatype, type_name, shape), path, parsed, guard)


_NO_TENSORS = {
    **dict.fromkeys(("as_sym_int", "as_sym_float", "as_sym_bool"), "a number"),
    **dict.fromkeys(("as_none", "as_int", "as_float", "as_bool", "as_string"), "a constant"),
}


def _bound(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise ValueError(f"{value!r} is no bound of a size")
    return value


def _input_paths(call: Mapping[str, Any] | None, count: int) -> list[tuple[str, str]]:
    if call is None:
        return [(f"ARGS[{index}]", f"[{index}]") for index in range(count)]
    found = argument_paths(json.loads(call["in_spec"])[1], call.get("forward_arg_names") or [])
    if len(found) != count:
        raise ValueError(f"it describes {len(found)} arguments and has {count}")
    return found


def argument_paths(spec: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the path in the call, and the name in conditions, of each leaf of the arguments. ``spec`` is PyTorch's
    description of their nesting, and ``names`` are the names of the arguments."""
    arguments, named = spec["children_spec"]
    found: list[tuple[str, str]] = []
    for index, spec in enumerate(arguments["children_spec"]):
        name = names[index] if index < len(names) else str(index)
        found += [(f"ARGS[{index}]{path}", f"['{name}']{guard}") for path, guard in _paths(spec)]
    for key, spec in zip(_keys(named), named["children_spec"], strict=True):
        found += [(f"KWARGS[{key}]{path}", f"['{key}']{guard}") for path, guard in _paths(spec)]
    return found


def _output_names(call: Mapping[str, Any] | None, count: int) -> list[tuple[str, str]]:
    if call is None:
        return [(f"OUTPUT__{index}", f"RESULT[{index}]") for index in range(count)]
    found = result_names(json.loads(call["out_spec"])[1])
    if len(found) != count:
        raise ValueError(f"it describes {len(found)} results and has {count}")
    return found


def result_names(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the name and the path of each leaf of the result."""
    paths = [f"RESULT{path}" for path, _ in _paths(spec)]
    keys = _keys(spec) if spec["type"] in _DICTIONARIES else []
    names = keys if len(keys) == len(paths) else [f"OUTPUT__{index}" for index in range(len(paths))]
    return list(zip(names, paths, strict=True))


_DICTIONARIES = ("builtins.dict", "collections.OrderedDict")


def _paths(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the paths of the leaves under ``spec``, a node of PyTorch's description of nested values: in Triton's
    notation, and in Python's."""
    if spec["type"] is None:
        yield "", ""
        return
    quoted = spec["type"] in _DICTIONARIES
    for key, child in zip(_keys(spec), spec["children_spec"], strict=True):
        for path, guard in _paths(child):
            yield f"[{key}]{path}", f"['{key}']{guard}" if quoted else f"[{key}]{guard}"


def _keys(spec: Mapping[str, Any]) -> list[str]:
    if spec["type"] in _DICTIONARIES:
        return [str(key) for key in json.loads(spec["context"])]
    return [str(index) for index in range(len(spec["children_spec"]))]
