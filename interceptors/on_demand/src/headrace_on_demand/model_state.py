"""The state of one model in the control mode. Event loop only."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from time import monotonic

from headrace import HeadraceError, LoadableModel, Outcome, Unavailable, Watch
from headrace_on_demand.on_demand_options import ModelSettings


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """A failed load. There is no other attempt before ``until_s``, a monotonic time."""

    error: HeadraceError
    until_s: float

    def refusal(self, name: str) -> HeadraceError:
        """Return the error for a request before the next attempt."""
        left_s = max(0.0, self.until_s - monotonic())
        return Unavailable(
            f"model '{name}' could not be loaded: {self.error.message.strip()} (the next attempt is in {left_s:.0f} s)",
            retry_after_s=left_s,
        )


class ModelState(Watch):
    """One requested model. It is the watch of its operations.

    ``in_flight`` counts the admitted operations that have not ended, ``waiting`` the callers that wait for the model.
    """

    def __init__(self, name: str, became_idle: Callable[[], None]) -> None:
        self.name = name
        self.in_flight = self.waiting = 0
        #: The end of its last operation, in monotonic nanoseconds.
        self.used_ns = 0
        self.settings = ModelSettings()
        #: Its direct dependencies.
        self.needed: Collection[str] = ()
        self.backend = ""
        #: The time after its last operation for which a sequence may continue.
        self.idle_s = 0.0
        #: Its last measured memory by device; empty if it was never loaded.
        self.measured: Mapping[str, int] = {}
        self.file_bytes = 0
        #: True if instances run in the server process; a guess until it is loaded.
        self.in_server = True
        #: The memory of its processes, and its share of the server's, in bytes.
        self.process_bytes = self.server_bytes = 0
        self.failed: FailedLoad | None = None
        self.loading: asyncio.Task[None] | None = None
        self.eviction: asyncio.Task[None] | None = None
        self.waiters: set[asyncio.Future[bool]] = set()
        self._became_idle = became_idle

    def ended(self, outcome: Outcome) -> None:
        self.in_flight -= 1
        self.used_ns = outcome.ended_ns
        if not self.in_flight:
            self._became_idle()

    def release(self) -> None:
        """`ended`, for an operation without an outcome."""
        self.in_flight -= 1
        self.used_ns = int(monotonic() * 1e9)
        if not self.in_flight:
            self._became_idle()

    def wake(self) -> None:
        """Wake every caller that waits for it."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(True)

    @property
    def idle_for_s(self) -> float:
        """The seconds since its last operation; 0 while one is in flight."""
        return 0.0 if self.in_flight or self.waiting else max(0.0, monotonic() - self.used_ns / 1e9)

    @property
    def has_sequences(self) -> bool:
        """True if an unload could lose a sequence."""
        return self.idle_s > 0

    @property
    def is_idle(self) -> bool:
        """True if it may be unloaded without loss: nothing is in flight, and no sequence may continue."""
        return not (self.in_flight or self.waiting) and self.idle_for_s >= self.idle_s

    def read_config(self, model: LoadableModel, settings: ModelSettings) -> None:
        """Read the config of ``model``."""
        self.settings, self.needed, self.backend = settings, model.needed, model.config.backend or model.config.platform
        self.file_bytes = model.file_bytes
        batching = model.config.sequence_batching
        has_sequences = model.config.HasField("sequence_batching")
        self.idle_s = (batching.max_sequence_idle_microseconds or 1_000_000) / 1e6 if has_sequences else 0.0


def format_size(size: float) -> str:
    """Return ``size`` in the form of the flags: ``1.5 GiB``."""
    unit = min(3, int(math.log(max(size, 1), 1024)))
    return f"{size / 1024**unit:.4g} {('bytes', 'KiB', 'MiB', 'GiB')[unit]}"
