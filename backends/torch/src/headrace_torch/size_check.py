"""Checks that the inputs of a request have sizes that a program was exported for."""

from __future__ import annotations

from collections.abc import Sequence

from headrace import InvalidArgument, Tensor
from headrace_torch.program_signature import ProgramSignature
from headrace_torch.program_sizes import Arithmetic

#: A smaller lower bound of a size means only that PyTorch did not examine sizes 0 and 1 (as in its own check).
_LEAST_BOUND = 3


class SizeCheck:
    """Checks the sizes of inputs as ``ExportedProgram.module()`` does. The config has checked the rest of the shapes.

    Empty (False) if no check can fail.
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
