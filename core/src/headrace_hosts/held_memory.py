"""One memory budget for a process: what all ports and protocols receive, decompress, queue, pack, cache and send.

`HeldBytes` counts what connections hold, until a response has been read. This adds what belongs to no connection:
decompressed bodies as long as their memory exists, outputs that threads pack, and the size of the response cache.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.samples import Sample

from headrace.errors import ConfigError, OutOfMemory
from headrace.telemetry.exposition import family_filter
from headrace.telemetry.log_limits import rate_limited_logger
from headrace_hosts.held_bytes import WAIT_S, HeldBytes
from headrace_hosts.memory_limits import AT_START
from headrace_hosts.returned_memory import returned_memory

if TYPE_CHECKING:
    from headrace.config.options import ServerOptions
    from headrace.engine import Engine

log = logging.getLogger(__name__)
#: What it writes is in the audit log, too.
audit_log = rate_limited_logger("headrace.audit.memory")

#: By default, connections get this part of the memory that is free when the server starts.
_PART = 2
#: The smallest default.
_LEAST_BYTES = 32 << 20
#: A refused caller may try again after this time.
RETRY_S = 1.0
#: Memory is returned to the system this time after a refusal.
RELEASE_S = 0.5
#: A log line says at most once in this time that the budget is used up.
_SAY_S = 60.0
_GIB = 1 << 30


def shown(size_bytes: int) -> str:
    """Return a size as log lines show it."""
    return f"{size_bytes / _GIB:.1f} GiB" if size_bytes >= _GIB else f"{size_bytes / (1 << 20):.0f} MiB"


def no_memory(reason: str) -> OutOfMemory:
    """Return the error for a caller that is refused for ``reason``."""
    return OutOfMemory(reason, retry_after_s=RETRY_S)


class HeldMemory(HeldBytes):
    """The budget of one server. For the event loop, except `take`, which any thread may call."""

    def __init__(self, limit_bytes: int, wait_s: float = WAIT_S, cache_bytes: int = 0) -> None:
        super().__init__(limit_bytes, wait_s=wait_s)
        self._cache_bytes = cache_bytes
        self.largest_bytes = limit_bytes - cache_bytes
        self._lock = threading.Lock()
        self._inflated_bytes = self._packed_bytes = 0
        #: Sizes of freed counted memory. A finalizer runs in any thread, at any line, so it takes no lock.
        self._freed: deque[int] = deque()
        self._said_at = -_SAY_S
        #: Returns free memory to the system.
        self.release_memory: Callable[[], None] = _nothing
        self._release_timer: asyncio.TimerHandle | None = None
        self.recount()

    def recount(self) -> None:
        with self._lock:
            self._sum_up()
        super().recount()

    def count_packed(self, size_bytes: int) -> None:
        """Count ``size_bytes`` that a large request or response takes besides its message; a negative number later.

        Raises `OutOfMemory` if more is held than may: the request or response is dropped, and the error is the answer.
        """
        if size_bytes > 0 and self.in_use_bytes > self.limit_bytes:
            self.hit()
            raise self._refusal(
                f"there is no memory to read or pack a message of {size_bytes} bytes: requests and responses take "
                f"{self.in_use_bytes} of the {self.limit_bytes} bytes that they may (--memory-budget)"
            )
        self._packed_bytes += size_bytes
        self.recount()
        self.grown()

    def take(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return memory of ``size_bytes``, which counts as long as it exists. Raises `OutOfMemory`. Any thread."""
        with self._lock:
            self._sum_up()
            if self.in_use_bytes + size_bytes > self.limit_bytes:
                raise self._refusal(
                    f"there is no memory to decompress the request: {size_bytes} bytes more are needed, and requests "
                    f"and responses take {self.in_use_bytes} of the {self.limit_bytes} bytes that they may "
                    "(--memory-budget)"
                )
            memory = self._counted(_CountedMemory(size_bytes, np.uint8))
        self.is_tight = self.in_use_bytes > self.soft_bytes
        return memory

    def take_received(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return memory of ``size_bytes`` for a request that arrives, which counts by `set`. Raises `MemoryError`."""
        return returned_memory(size_bytes, self.is_short)

    def count_body(self, body: bytes) -> memoryview:
        """Return a view of ``body``, which a library has received. It counts as long as a view exists.

        Raises `OutOfMemory` if more is held than may.
        """
        with self._lock:
            self._sum_up()
            if self.in_use_bytes + len(body) > self.limit_bytes:
                raise self._refusal(
                    f"there is no memory for a message of {len(body)} bytes: requests and responses take "
                    f"{self.in_use_bytes} of the {self.limit_bytes} bytes that they may (--memory-budget)"
                )
            return self._counted(_CountedMemory(len(body), np.uint8, body)).data

    def _refusal(self, reason: str) -> OutOfMemory:
        self.refused += 1
        self.audit(f"a request is refused: {reason}")
        return no_memory(reason)

    def _counted(self, memory: _CountedMemory) -> npt.NDArray[np.uint8]:
        memory.freed = self._freed
        self._inflated_bytes += memory.nbytes
        self.other_bytes += memory.nbytes
        return memory

    def _sum_up(self) -> None:
        """Subtract the freed memory, and set `other_bytes`. The caller has the lock."""
        while self._freed:
            self._inflated_bytes -= self._freed.popleft()
        self.other_bytes = self._cache_bytes + self._inflated_bytes + self._packed_bytes

    def audit(self, text: str) -> None:
        audit_log.info("%s", text)

    def hit(self) -> None:
        if self._release_timer is None:
            self._release_timer = asyncio.get_running_loop().call_later(RELEASE_S, self._release_memory)
        now = monotonic()
        if now - self._said_at > _SAY_S:
            self._said_at = now
            log.warning(
                "the memory budget of %s is used up: large requests wait for memory, and are refused after %g s "
                "(--memory-budget)",
                shown(self.limit_bytes),
                self._wait_s,
            )

    def _release_memory(self) -> None:
        """Return what refusals have freed: the allocator would keep it, beside what others then allocate."""
        self._release_timer = None
        self.release_memory()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the budget."""
        self.recount()
        yield GaugeMetricFamily(
            "headrace_memory_budget_bytes", "Most bytes that requests and responses may take", self.limit_bytes
        )
        held = GaugeMetricFamily(
            "headrace_memory_held_bytes", "Bytes of the memory budget that are in use", labels=("kind",)
        )
        for kind, size in (
            ("connections", self.total_bytes),
            ("decompressed", self._inflated_bytes),
            ("packed", self._packed_bytes),
            ("cache", self._cache_bytes),
        ):
            held.add_metric((kind,), size)
        yield held
        yield GaugeMetricFamily("headrace_memory_waiting", "Number of requests that wait for memory", self.waiting)
        refused = "headrace_memory_refused_total"  # `CounterMetricFamily` would take `_total` out of the family's name
        family = Metric(refused, "Number of requests and connections that were ended for memory", "counter")
        family.samples.append(Sample(refused, {}, self.refused))
        yield family


class _CountedMemory(np.ndarray[Any, Any]):
    """Memory that counts until nobody refers to it.

    A view of an array refers to the owner of the memory, and to no view between them. So this is the owner, or the
    first view of what is no array.
    """

    freed: deque[int] | None = None  # of the object itself; its views have None

    def __del__(self) -> None:
        if self.freed is not None:
            self.freed.append(self.nbytes)


def _nothing() -> None:
    """Return nothing to the system."""


_budgets: WeakKeyDictionary[Engine, HeldMemory] = WeakKeyDictionary()


def budget_of(engine: Engine) -> HeldMemory:
    """Return the one budget of a server, for all of its ports. Made, and said in the log, when first asked for.

    Raises `ConfigError` if the cache is larger.
    """
    budget = _budgets.get(engine)
    if budget is None:
        _budgets[engine] = budget = _make(engine.options)
        collect, shows = engine.collect, family_filter(engine.options.metrics_config)

        def with_budget() -> Iterable[Metric]:
            return chain(collect(), filter(lambda family: shows(family.name), tuple(budget.collect())))

        engine.collect = with_budget
        engine.off_loop_work.count, budget.release_memory = budget.count_packed, engine.off_loop_work.release_memory
    return budget


def _make(options: ServerOptions) -> HeldMemory:
    size = options.cache_config.get("local", {}).get("size", "")
    cache_bytes = int(size) if size.isdigit() else 0
    servers = max(1, options.workers)
    if options.memory_budget:
        limit = options.memory_budget // servers
        if limit <= cache_bytes:
            raise ConfigError(
                f"--memory-budget={options.memory_budget} leaves nothing for requests: the response cache has "
                f"{cache_bytes} bytes" + (f" in each of {servers} workers" if servers > 1 else "")
            )
        why = "as --memory-budget says"
    else:
        free, rule = AT_START
        limit = cache_bytes + max(_LEAST_BYTES, free // servers - cache_bytes) // _PART
        why = f"half of what this process may use of {rule}, {shown(free)} (--memory-budget)"
    log.info(
        "Memory budget of requests, responses and the response cache: %s%s, %s",
        shown(limit),
        f" for each of {servers} workers" if servers > 1 else "",
        why,
    )
    return HeldMemory(limit, options.memory_wait_secs, cache_bytes)
