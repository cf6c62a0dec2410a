"""The executions of a ``model.pt2``: a function of tensors, in the order of its signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from headrace import InvalidArgument, Model, Tensor, Tensors
from headrace_torch.exported_program import Program
from headrace_torch.instance import ForwardInstance
from headrace_torch.program_signature import ProgramSignature
from headrace_torch.program_sizes import Arithmetic
from headrace_torch.tensor_names import LeafNames

#: Smaller lower bounds are not checked, as in PyTorch: they mean that sizes 0 and 1 were not examined.
_LEAST_BOUND = 3


class ProgramInstance(ForwardInstance):
    """Runs ``program``. ``options`` are those of `ForwardInstance`.

    Microseconds of CPU for two f32[1, 16] inputs and outputs: two operators called by Python 1.5, the program 3.3, an
    execution 14, ``ExportedProgram.module()`` of the same file 50. As a package of AOTInductor: the package 5.5, of
    which its C interface takes 4, an execution 19.

    Raises `ConfigError` if the config contradicts the program's signature.
    """

    def __init__(self, torch: Any, program: Program, model: Model, **options: Any) -> None:
        signature = program.signature
        names = LeafNames(model.config, signature)
        names.require_agreement()
        inputs = names.ordered_inputs
        forward = replace(program.forward, arguments=inputs)
        super().__init__(torch, forward, model, inputs, names.outputs, **options)
        self._scalars = {
            name for name, leaf in zip(inputs, signature.inputs, strict=True) if leaf.is_known and not leaf.tensor.shape
        }
        check = SizeCheck(signature)
        self._check: Callable[[Sequence[str], Sequence[Tensor]], None] | None = check.require if check else None

    def _answer(self, inputs: Tensors) -> Tensors:
        arrays = [inputs[name] for name in self._names]
        if self._check is not None:
            self._check(self._names, arrays)
        if self._scalars:
            pairs = zip(self._names, arrays, strict=True)
            arrays = [array.reshape(()) if name in self._scalars else array for name, array in pairs]
        tensors = [self._tensor(name, array) for name, array in zip(self._names, arrays, strict=True)]
        return self._results(self._run(*tensors))


class SizeCheck:
    """Checks the variable sizes of inputs as ``ExportedProgram.module()`` does. The config covers the fixed ones.

    False if no check can fail.
    """

    def __init__(self, signature: ProgramSignature) -> None:
        self._ranges = signature.ranges
        #: For each symbol that is the size of an axis: the input and the axis.
        self._axes: dict[str, tuple[int, int]] = {}
        self._places: list[tuple[int, int, Arithmetic]] = []
        for place, leaf in enumerate(signature.inputs):
            for axis, size in enumerate(leaf.sizes):
                if isinstance(size, Arithmetic):
                    self._places.append((place, axis, size))
                    if size.symbol is not None:
                        self._axes.setdefault(size.symbol, (place, axis))
        self._guarded = {
            f"L{leaf.guard}.size()[{axis}]": (place, axis)
            for place, leaf in enumerate(signature.inputs)
            for axis in range(len(leaf.sizes))
        }
        self._conditions = signature.conditions

    def __bool__(self) -> bool:
        repeats = len(self._places) > len(self._axes)
        bounds = [self._ranges.get(symbol, (None, None)) for symbol in self._axes]
        is_bounded = any((low or 0) >= _LEAST_BOUND or high is not None for low, high in bounds)
        return repeats or is_bounded or bool(self._conditions)

    def require(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Raise `InvalidArgument` with the input, the size and the rule."""
        shapes = [tensor.shape for tensor in tensors]
        sizes = {symbol: shapes[place][axis] for symbol, (place, axis) in self._axes.items()}
        for symbol, (place, axis) in self._axes.items():
            low, high = self._ranges.get(symbol, (None, None))
            size = sizes[symbol]
            if (low is not None and low >= _LEAST_BOUND and size < low) or (high is not None and size > high):
                raise InvalidArgument(
                    f"input '{names[place]}': axis {axis} is {size} long, but the program was exported for "
                    f"{_range(low, high)}"
                )
        for place, axis, size_of in self._places:
            if size_of.symbols <= sizes.keys() and size_of.value(sizes) != shapes[place][axis]:
                raise InvalidArgument(
                    f"input '{names[place]}': axis {axis} is {shapes[place][axis]} long, but with the other sizes of "
                    f"the request the program takes {size_of.value(sizes)} ({size_of.text})"
                )
        seen = {key: shapes[place][axis] for key, (place, axis) in self._guarded.items()}
        for condition in self._conditions:
            if not condition.value(seen):
                raise InvalidArgument(f"the program was exported for inputs with {condition.text}")


def _range(low: int | None, high: int | None) -> str:
    if high is None:
        return f"{low} and more"
    return f"{low or 0} to {high}"
