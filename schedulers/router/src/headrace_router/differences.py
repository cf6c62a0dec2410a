"""The differences between the outputs of two models: for numbers their size, for all others the number of elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import BytesTensor, Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Two numbers are the same if they differ by at most ``absolute + relative * abs(expected)``, as in NumPy."""

    relative: float = 1e-3
    absolute: float = 1e-5


@dataclass(slots=True)
class Difference:
    """The differences of one output, of one response or added up.

    ``elements`` were compared, and ``beyond`` of them differ by more than the tolerance. ``relative`` is the sum of the
    relative differences of all elements: the difference over the larger absolute value, so at most 2. ``largest`` is
    the largest absolute difference. If the shapes differ, all elements count as beyond, with a relative difference of
    1.
    """

    elements: int = 0
    beyond: int = 0
    relative: float = 0.0
    largest: float = 0.0

    def add(self, other: Difference) -> None:
        self.elements += other.elements
        self.beyond += other.beyond
        self.relative += other.relative
        self.largest = max(self.largest, other.largest)

    @property
    def mean_relative(self) -> float:
        return self.relative / self.elements if self.elements else 0.0


def compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: Tolerance) -> dict[str, Difference]:
    """Return the difference of each output of ``expected``. Any thread."""
    return {name: difference(tensor, found.get(name), tolerance) for name, tensor in expected.items()}


def difference(expected: Tensor, found: Tensor | None, tolerance: Tolerance) -> Difference:
    """Return the difference of one output; ``found`` is None if it is missing."""
    one = _array(expected)
    other = None if found is None else _array(found)
    if other is None or one.shape != other.shape:
        return Difference(one.size, one.size, float(one.size))
    if one.dtype.kind not in "biuf" or other.dtype.kind not in "biuf":
        return _of_unequal(np.asarray(one != other))
    return _of_numbers(one, other, tolerance)


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.to_objects() if isinstance(tensor, BytesTensor) else np.asarray(tensor)
    if array.dtype.kind == "V" and array.dtype.type is not np.void:  # BF16 of the package ml_dtypes
        return array.astype(np.float32)
    return array


def _of_unequal(unequal: npt.NDArray[np.bool_]) -> Difference:
    count = int(np.count_nonzero(unequal))
    return Difference(unequal.size, count, float(count), 1.0 if count else 0.0)


def _of_numbers(one: npt.NDArray[Any], other: npt.NDArray[Any], tolerance: Tolerance) -> Difference:
    a, b = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        if one.dtype.kind in "iu" and one.dtype == other.dtype:  # exact, also beyond 2^53
            wrapped = np.where(one > other, one - other, other - one)
            gap = wrapped.view(f"u{one.dtype.itemsize}").astype(np.float64)
        else:
            gap = np.abs(a - b)
            gap[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
            gap[np.isnan(gap)] = np.inf  # a number and NaN
        size = np.maximum(np.abs(a), np.abs(b))
        relative = np.where(np.isfinite(gap), gap / np.where(size > 0, size, 1.0), 1.0)
        limit = tolerance.absolute + tolerance.relative * np.where(np.isfinite(a), np.abs(a), 0.0)
        beyond = int(np.count_nonzero(gap > limit))
    largest = float(min(gap.max(), _MAX)) if gap.size else 0.0
    return Difference(one.size, beyond, float(relative.sum()), largest)


#: The value for an infinite difference, which JSON cannot express.
_MAX = 1e300
