"""The states of models and their versions, as in the index, up to the end of a version.

::

    UNKNOWN -> LOADING -> READY -> UNLOADING -> UNAVAILABLE (reason 'unloaded')
                  └-> UNAVAILABLE (reason '<Code>: <message>')

Source: docs/spec/behaviours.md sections 5.3 (with the reasons why a model is not loaded), 5.5 and 5.6.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from time import monotonic
from typing import NamedTuple

from headrace.errors import HeadraceError, InternalError, InvalidArgument, LoadError, OperatorError, summary
from headrace.executors.threads import run_on_thread
from headrace.models.served import ServedModel
from headrace.models.versions import VersionFingerprint
from headrace.storage.repositories import Fingerprint
from headrace.telemetry.logs import VERBOSE_2

log = logging.getLogger(__name__)


class State(Enum):
    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


UNLOADED = "unloaded"


@dataclass(slots=True)
class VersionRecord:
    """One version. ``served`` is set exactly while requests may reach it. ``fingerprint`` is that of its files and
    config."""

    state: State = State.UNKNOWN
    reason: str = ""
    served: ServedModel | None = None
    fingerprint: VersionFingerprint | None = None

    def is_still(self, fingerprint: VersionFingerprint) -> bool:
        """True if it is served, all instances are alive, and loading ``fingerprint`` would change nothing."""
        return self.served is not None and self.served.ready and self.fingerprint == fingerprint

    def wants_instances(self, fingerprint: VersionFingerprint) -> bool:
        """True if it is served, all instances are alive, and ``fingerprint`` differs in instances only."""
        return (
            self.served is not None
            and self.served.ready
            and self.served.can_replace_instances
            and fingerprint.differs_in_instances(self.fingerprint)
        )

    @property
    def shown(self) -> tuple[State, str]:
        """State and reason as in the index.

        A version that waits for the restart of an instance takes requests, but may not answer them. It is shown as
        unavailable.
        """
        if self.state is State.READY and self.served is not None and not self.served.ready:
            return State.UNAVAILABLE, f"Unavailable: {self.served.reason}"
        return self.state, self.reason

    @property
    def is_settled(self) -> bool:
        """True for strict readiness: ready, or unloaded on purpose."""
        return self.state is State.READY or (self.state is State.UNAVAILABLE and self.reason == UNLOADED)

    @property
    def has_failed(self) -> bool:
        """True if only the reason is left why it could not be loaded."""
        return self.state is State.UNAVAILABLE and self.reason != UNLOADED


@dataclass(slots=True)
class ModelRecord:
    """One model. ``problem`` is the reason why none of its versions can be loaded, such as a bad config or a duplicate.

    If ``counts``, it counts for strict readiness: not if its config could not even be read, as in Triton.
    ``fingerprint`` is that of the files that it was loaded from; None if it is not loaded.
    """

    name: str
    versions: dict[int, VersionRecord] = field(default_factory=dict)
    problem: str = ""
    counts: bool = True
    fingerprint: Fingerprint | None = None

    @property
    def is_served(self) -> bool:
        """True if requests may reach any version."""
        return any(version.served is not None for version in self.versions.values())

    @property
    def is_settled(self) -> bool:
        """True if there is a version, and each one is ready or unloaded on purpose."""
        return bool(self.versions) and all(version.is_settled for version in self.versions.values())

    @property
    def is_alive(self) -> bool:
        """True if every instance of the served versions is alive."""
        return all(version.served is None or version.served.ready for version in self.versions.values())


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index. ``version`` and ``state`` are empty for a model that was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
    #: Its memory, in a control mode that counts it; else 0.
    memory_bytes: int = 0


def index_of(record: ModelRecord, ready_only: bool) -> list[IndexEntry]:
    """Return the lines of ``record`` in the index."""
    if record.problem or not record.versions:
        if ready_only:
            return []
        return [IndexEntry(record.name, "", State.UNAVAILABLE.value if record.problem else "", record.problem)]
    return [
        IndexEntry(record.name, str(number), state.value, reason)
        for number, (state, reason) in sorted((number, version.shown) for number, version in record.versions.items())
        if not ready_only or state is State.READY
    ]


# ---------------------------------------------------------------------------
# Why a model is not loaded
# ---------------------------------------------------------------------------


def poll_failure(name: str, reason: str = "", *, is_override: bool = False) -> HeadraceError:
    """Return the error for a model that is missing or has a wrong config, with ``reason`` if there is one.

    It is the caller's error if the caller has sent the config (``is_override``), else the server's.
    """
    text = f"failed to load '{name}', failed to poll from model repository" + (reason and f": {reason}")
    return InvalidArgument(text) if is_override else LoadError(text)


def versions_failure(name: str, failed: Mapping[int, HeadraceError]) -> OperatorError:
    """Return the error for versions that could not be loaded, with one clause for each."""
    clauses = "".join(f"version {n} is at UNAVAILABLE state: {reason(error)};\n" for n, error in failed.items())
    return OperatorError(f"load failed for model '{name}': {clauses}")


def reason(error: HeadraceError) -> str:
    """Return ``error`` as in the index."""
    return f"{error.code.value}: {error.message}"


def unexpected(error: Exception) -> HeadraceError:
    """Return the error for an unexpected exception, and log it."""
    log.error("unexpected error while loading", exc_info=error)
    failure = InternalError(summary(error))
    failure.__cause__ = error
    return failure


# ---------------------------------------------------------------------------
# The end of a model that takes no more requests, and its time limit
# ---------------------------------------------------------------------------


#: After this time, in s, a model that has not ended is logged with the reason.
LATE_S = 10.0

#: The share of the server's time to stop that an instance gets. The rest is for killing it.
_CLOSING_PART = 0.8


class ShutdownDeadline:
    """The time that an instance in a process may take to close before it is killed.

    ``exit_timeout_s`` is the time that the server may take to stop.
    """

    def __init__(self, exit_timeout_s: float) -> None:
        self._whole_s = exit_timeout_s
        self._ends: float | None = None

    def stopping(self) -> None:
        """Note that the server has begun to stop: its time, and that of every instance, runs from now."""
        self._ends = monotonic() + self._whole_s

    def __call__(self) -> float:
        """Return the seconds for an instance that closes from now on."""
        left_s = self._whole_s if self._ends is None else self._ends - monotonic()
        return _CLOSING_PART * max(left_s, 0.0)


class Draining(NamedTuple):
    """A model that is being unloaded, and the record that gets its final state."""

    record: VersionRecord
    model: ServedModel


async def drain(draining: Iterable[Draining], unloaded: Callable[[ServedModel], None]) -> None:
    """Wait until models have answered their requests, and close them.

    ``unloaded`` is called for each, on the thread that has waited for its end. Failures are logged: a model that fails
    to close is removed anyway, and blocks no other. Event loop only.
    """
    await asyncio.gather(*(_drain_one(each, unloaded) for each in draining))


async def _drain_one(draining: Draining, unloaded: Callable[[ServedModel], None]) -> None:
    record, model = draining
    try:
        await _log_if_late(model.drain(), draining, "waits for its requests")
    except Exception:
        log.exception("'%s' version %d failed to wait for its requests", model.name, model.version)
    try:
        model.close()
        # It may take any time.
        closing = run_on_thread(partial(_end, model, unloaded), f"headrace-close-{model.name}")
        await _log_if_late(closing, draining, "waits for the close of its instances")
        log.log(VERBOSE_2, "OnDestroy callback() '%s' version %d", model.name, model.version)
        log.info("successfully unloaded '%s' version %d", model.name, model.version)
    except Exception:
        log.exception("'%s' version %d failed to close", model.name, model.version)
    record.state, record.reason = State.UNAVAILABLE, UNLOADED


async def _log_if_late(work: Awaitable[None], draining: Draining, what: str) -> None:
    """Await ``work``. If it takes longer than `LATE_S`, write the reason to the log and the index."""
    record, model = draining

    def log_late() -> None:
        record.reason = f"{what} since {LATE_S:g} s{_busy(model)}"
        log.warning("'%s' version %d %s", model.name, model.version, record.reason)

    timer = asyncio.get_running_loop().call_later(LATE_S, log_late)
    try:
        await work
    finally:
        timer.cancel()


def _busy(model: ServedModel) -> str:
    """Return which instances of ``model`` are executing, and whether they can be ended."""
    busy = [executor for executor in model.executors if executor.executing or executor.unanswered]
    if not busy:
        return ""
    names = ", ".join(f"'{executor.name}'" for executor in busy)
    if all(executor.runs_on == "process" for executor in busy):
        return f": {names} executes"
    return f": {names} executes on a thread of the server, which cannot be ended before its execution returns"


def _end(model: ServedModel, unloaded: Callable[[ServedModel], None]) -> None:
    try:
        model.join()
    finally:
        unloaded(model)
