"""Rules that many fields share: ranks, sizes, durations. Arithmetic in Python's unbounded integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from headrace.config.validation.problem import Problem
from headrace.messages import dtypes

#: NumPy 1.26, the oldest that Headrace runs with, takes no more.
MAX_RANK = 32
#: Of elements and of bytes: what a signed 64-bit integer holds.
MAX_SIZE = 2**63 - 1
#: Waits are counted in nanoseconds in a signed 64-bit integer; this is 292 years.
MAX_MICROSECONDS = MAX_SIZE // 1000
#: Of a tensor that the server makes up by itself: warm-up data, initial states.
MAX_MADE_BYTES = 4 * 2**30
#: Every element of BYTES has a length in front.
_LENGTH_BYTES = 4


def size_in_bytes(dims: Sequence[int], data_type: int) -> int:
    """The least size of a tensor; variable dims count as 1. ``data_type`` is a config value, not 0."""
    return _elements(dims) * (dtypes.BY_CONFIG_VALUE[data_type].itemsize or _LENGTH_BYTES)


def check_shape(field: str, name: str, dims: Sequence[int], data_type: int, suffix: str) -> Iterator[Problem]:
    """The rank, the element count and the byte size of tensor ``name``; ``suffix`` names the model."""
    if len(dims) > MAX_RANK:
        yield Problem(field, f"tensor '{name}' has {len(dims)} dims, the limit is {MAX_RANK}{suffix}")
    elif _elements(dims) > MAX_SIZE:
        yield Problem(field, f"element count for tensor '{name}' exceeds maximum size of {MAX_SIZE}{suffix}")
    elif data_type and size_in_bytes(dims, data_type) > MAX_SIZE:
        yield Problem(field, f"byte size for tensor '{name}' exceeds maximum size of {MAX_SIZE}{suffix}")


def check_duration(field: str, microseconds: int, suffix: str) -> Iterator[Problem]:
    """A duration must fit the clock that counts it."""
    if microseconds > MAX_MICROSECONDS:
        yield Problem(field, f"{field} is {microseconds}, the limit is {MAX_MICROSECONDS} (292 years){suffix}")


def invalid_dimension(name: str, dims: Sequence[int]) -> str:
    """The text for a negative dim that is not -1 (docs/spec/behaviours.md section 3.2)."""
    return f"tensor '{name}' contains an invalid dimension in shape [{','.join(map(str, dims))}]"


def _elements(dims: Sequence[int]) -> int:
    return prod(dim for dim in dims if dim >= 0)
