"""The number, the errors and the durations of the recent requests of one target.

A window is a ring of slices. A slice counts requests, errors, and durations in buckets. Each bucket is at most 1/16
wider than the one before, so a percentile is exact to about 6 %. A request only appends its duration; hundreds are
counted at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Counts: TypeAlias = npt.NDArray[np.int64]

_SLICES = 12
#: Each power of two has this many buckets.
_PER_OCTAVE = 16
#: Durations from 2^44 ns on, about five hours, count in the last bucket.
_BUCKETS = (44 - 4) * _PER_OCTAVE
#: The number of durations that are counted at once.
_MAX_NOTED = 512


class _Slice:
    __slots__ = ("_buckets", "errors", "noted", "number", "requests")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = self.errors = 0
        self.noted: list[int] = []
        self._buckets: _Counts = np.zeros(_BUCKETS, np.int64)

    @property
    def buckets(self) -> _Counts:
        """i64[buckets]: the requests by the bucket of their duration."""
        if self.noted:
            self._buckets += np.bincount(buckets_of(np.array(self.noted, np.int64)), minlength=_BUCKETS)
            self.noted.clear()
        return self._buckets


class SlidingWindow:
    """The requests of the last ``window_ns``, to within a twelfth of it. Times are those of one monotonic clock."""

    __slots__ = ("_current", "_end_ns", "_ring", "_slice_ns")

    def __init__(self, window_ns: int) -> None:
        self._slice_ns = max(1, window_ns // _SLICES)
        self._current, self._end_ns = _Slice(-1), 0
        self._ring: list[_Slice] = []

    def add(self, now_ns: int, duration_ns: int, is_error: bool) -> None:
        """Count a request that has ended at ``now_ns`` after ``duration_ns``."""
        if now_ns >= self._end_ns:
            self._begin(now_ns)
        current = self._current
        current.requests += 1
        if is_error:
            current.errors += 1
        noted = current.noted
        noted.append(duration_ns)
        if len(noted) >= _MAX_NOTED:
            _ = current.buckets

    def _begin(self, now_ns: int) -> None:
        number = now_ns // self._slice_ns
        self._current = _Slice(number)
        self._end_ns = (number + 1) * self._slice_ns
        self._ring = [each for each in self._ring if each.number > number - _SLICES]
        self._ring.append(self._current)

    def clear(self) -> None:
        """Forget all requests."""
        self._end_ns = 0
        self._ring.clear()

    def total(self, now_ns: int) -> WindowTotal:
        """Return the sums of the slices that are not too old."""
        first = now_ns // self._slice_ns - _SLICES
        return WindowTotal([each for each in self._ring if each.number > first])


class WindowTotal:
    """The sums of a window."""

    def __init__(self, slices: Sequence[_Slice]) -> None:
        self.requests = sum(each.requests for each in slices)
        self.errors = sum(each.errors for each in slices)
        self._slices = slices

    @property
    def error_rate(self) -> float:
        """The share of requests that failed, from 0 to 1; 0 without requests."""
        return self.errors / self.requests if self.requests else 0.0

    def percentile_ns(self, share: float) -> int:
        """Return the duration that ``share`` of the requests do not exceed, to about 6 %; 0 without requests."""
        if not self.requests:
            return 0
        counted = np.cumsum(sum(each.buckets for each in self._slices))
        return end_of(int(np.searchsorted(counted, share * self.requests)))


def buckets_of(durations_ns: _Counts) -> _Counts:
    """Return the number of the bucket of each of ``durations_ns``, i64[n]."""
    durations_ns = np.maximum(durations_ns, 0)
    _, exponents = np.frexp(durations_ns.astype(np.float64))
    octaves = np.maximum(exponents.astype(np.int64) - 5, 0)
    found: _Counts = np.minimum(octaves * _PER_OCTAVE + (durations_ns >> octaves), _BUCKETS - 1)
    return found


def end_of(bucket: int) -> int:
    """Return the longest duration in ``bucket``, in ns."""
    octave = max(0, bucket // _PER_OCTAVE - 1)
    return ((bucket - octave * _PER_OCTAVE + 1) << octave) - 1
