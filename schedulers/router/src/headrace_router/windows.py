"""The requests of one target in the last seconds: how many, how many failed, and how long they took.

A window is a ring of slices. A slice counts its requests, its errors, and its durations in buckets of which each is at
most 1/16 wider than the one before, so that a percentile is right to about 6 %.
"""

from __future__ import annotations

from collections.abc import Sequence

_SLICES = 12
#: Each power of two has this many buckets.
_PER_OCTAVE = 16
#: Durations from 2^44 ns on, about five hours, count in the last bucket.
_BUCKETS = (44 - 4) * _PER_OCTAVE


class _Slice:
    __slots__ = ("buckets", "errors", "number", "requests")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = self.errors = 0
        self.buckets: dict[int, int] = {}


class SlidingWindow:
    """The requests of the last ``window_ns``, to within a twelfth of it. Times are those of one monotonic clock."""

    __slots__ = ("_current", "_ring", "_slice_ns")

    def __init__(self, window_ns: int) -> None:
        self._slice_ns = max(1, window_ns // _SLICES)
        self._current = _Slice(-1)
        self._ring: list[_Slice] = []

    def add(self, now_ns: int, duration_ns: int, is_error: bool) -> None:
        """Count a request that ended ``now_ns`` after ``duration_ns``."""
        number = now_ns // self._slice_ns
        current = self._current
        if current.number != number:
            current = self._current = _Slice(number)
            self._ring = [each for each in self._ring if each.number > number - _SLICES]
            self._ring.append(current)
        current.requests += 1
        if is_error:
            current.errors += 1
        bucket = bucket_of(duration_ns)
        current.buckets[bucket] = current.buckets.get(bucket, 0) + 1

    def clear(self) -> None:
        self._current, self._ring = _Slice(-1), []

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
        counts: dict[int, int] = {}
        for each in self._slices:
            for bucket, count in each.buckets.items():
                counts[bucket] = counts.get(bucket, 0) + count
        left = share * self.requests
        for bucket in sorted(counts):
            left -= counts[bucket]
            if left <= 0:
                return end_of(bucket)
        return 0


def bucket_of(duration_ns: int) -> int:
    """Return the number of the bucket of ``duration_ns``."""
    octave = max(0, duration_ns.bit_length() - 5)
    return min(octave * _PER_OCTAVE + (duration_ns >> octave), _BUCKETS - 1) if duration_ns > 0 else 0


def end_of(bucket: int) -> int:
    """Return the longest duration in ``bucket``, in ns."""
    octave = max(0, bucket // _PER_OCTAVE - 1)
    return ((bucket - octave * _PER_OCTAVE + 1) << octave) - 1
