"""The choice of a target by weights.

Without a key, choices follow a sequence of low discrepancy: the fractional parts of the multiples of the golden ratio
(a Weyl sequence). After N requests, each target is within a few requests of its share. Every regular subsequence is
split in the same way, so a client that alternates two kinds of requests does not send one kind to each target.

With a key, the choice is weighted rendezvous hashing: each target draws a number from the key, and the smallest number
over weight wins. The choice depends on the key, the names and the weights only: it is the same after a restart and in
every worker. If the weight of one target changes, keys move only to or from this target, and as few as possible.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from math import fsum, log

_ONE = 1 << 64
#: The golden ratio's fractional part, of 64 bits.
_STEP = 0x9E3779B97F4A7C15
#: The number of cached hashes, and the maximum characters of a cached key.
_CACHED_KEYS, _LONGEST_CACHED = 4096, 128


class Split:
    """Chooses targets by ``weights``, of which at least one is above 0. ``labels`` are the names for hashing.

    ``start`` is the `point` of an earlier split, from which this one continues.
    """

    __slots__ = ("_bounds", "_cached_hash", "_hashers", "point", "weights")

    def __init__(self, labels: Sequence[str], weights: Sequence[float], start: int = 0) -> None:
        self.weights = tuple(weights)
        total = fsum(weights)
        #: The ends of the targets' parts of 0 to 2^64. The last end is never reached, and left out.
        self._bounds = [int(end / total * _ONE) for end in accumulate(weights)][:-1]
        self.point = start
        self._hashers = [
            (index, weight, blake2b(label.encode(), digest_size=8))
            for index, (label, weight) in enumerate(zip(labels, weights, strict=True))
            if weight
        ]
        self._cached_hash = lru_cache(_CACHED_KEYS)(self._hash)

    def next(self) -> int:
        """Return the index of the target of the next request."""
        self.point = point = (self.point + _STEP) % _ONE
        return bisect_right(self._bounds, point)

    def of_key(self, key: str) -> int:
        """Return the index of the target of the requests with ``key``."""
        return self._cached_hash(key) if len(key) <= _LONGEST_CACHED else self._hash(key)

    def _hash(self, key: str) -> int:
        data = b"\0" + key.encode(errors="surrogatepass")
        best, least = self._hashers[0][0], float("inf")
        for index, weight, prefix in self._hashers:
            hasher = prefix.copy()
            hasher.update(data)
            drawn = -log((int.from_bytes(hasher.digest(), "big") + 1) / _ONE) / weight
            if drawn < least:
                best, least = index, drawn
        return best
