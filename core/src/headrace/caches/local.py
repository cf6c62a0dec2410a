"""The built-in cache ``local``: stores the responses of all models in the server's memory, up to a limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from headrace.caches.base import CachedResponse, ResponseCache
from headrace.telemetry.published import PublishedMetric


@dataclass(frozen=True, slots=True)
class LocalCacheParameters:
    size: int = 0  #: bytes that all entries together may take

    def __post_init__(self) -> None:
        if self.size <= 0:
            raise ValueError("Failed to initialize LocalCache: config didn't contain a valid 'size' field.")


class LocalCache(ResponseCache):
    """Evicts the least recently used entry. ``used_bytes`` counts tensors, keys and the objects around them."""

    name: ClassVar[str] = "local"
    Parameters = LocalCacheParameters
    metrics: ClassVar[Sequence[PublishedMetric]] = (
        PublishedMetric("headrace_local_cache_entries", "Number of responses in the cache"),
        PublishedMetric("headrace_local_cache_used_bytes", "Memory that these responses take, in bytes"),
        PublishedMetric(
            "headrace_local_cache_evictions_total", "Number of responses evicted to make room for others", "counter"
        ),
    )

    def __init__(self, parameters: LocalCacheParameters) -> None:
        super().__init__(parameters)
        self.used_bytes = self._evictions = 0
        self._size = self.largest_bytes = parameters.size
        self._entries: OrderedDict[bytes, CachedResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> CachedResponse | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, response: CachedResponse) -> None:
        if key in self._entries or response.size_bytes > self._size:
            return
        self._entries[key] = response
        self.used_bytes += response.size_bytes
        while self.used_bytes > self._size:
            _, evicted = self._entries.popitem(last=False)
            self.used_bytes -= evicted.size_bytes
            self._evictions += 1

    def measure(self) -> Mapping[str, float]:
        entries, used, evictions = (metric.name for metric in self.metrics)
        return {entries: len(self), used: self.used_bytes, evictions: self._evictions}

    def close(self) -> None:
        self._entries.clear()
        self.used_bytes = 0
