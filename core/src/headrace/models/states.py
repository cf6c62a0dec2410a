"""The states of models and their versions, as the index shows them, down to the end of a version.

::

    UNKNOWN -> LOADING -> READY -> UNLOADING -> UNAVAILABLE (reason 'unloaded')
                  └-> UNAVAILABLE (reason '<Code>: <message>')

Source: docs/spec/behaviours.md sections 5.3, whose words say why a model is not loaded, 5.5 and 5.6.
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
from headrace.executors.threads import apart
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
    """One version. ``served`` is set exactly while requests may reach it; ``fingerprint`` is of what it was made of."""

    state: State = State.UNKNOWN
    reason: str = ""
    served: ServedModel | None = None
    fingerprint: VersionFingerprint | None = None

    def is_still(self, fingerprint: VersionFingerprint) -> bool:
        """Whether it is served, every instance alive, and to load what has ``fingerprint`` would change nothing."""
        return self.served is not None and self.served.ready and self.fingerprint == fingerprint

    def wants_instances(self, fingerprint: VersionFingerprint) -> bool:
        """Whether it is served, every instance alive, and what has ``fingerprint`` differs in instances only."""
        return (
            self.served is not None
            and self.served.ready
            and self.served.can_exchange_instances
            and fingerprint.differs_in_instances(self.fingerprint)
        )

    @property
    def shown(self) -> tuple[State, str]:
        """State and reason as the index has them: a version that waits for an instance to be restarted
        takes requests, but whether it will answer them nobody knows."""
        if self.state is State.READY and self.served is not None and not self.served.ready:
            return State.UNAVAILABLE, f"Unavailable: {self.served.reason}"
        return self.state, self.reason

    @property
    def is_settled(self) -> bool:
        """Fine for strict readiness: ready, or unloaded on purpose."""
        return self.state is State.READY or (self.state is State.UNAVAILABLE and self.reason == UNLOADED)

    @property
    def has_failed(self) -> bool:
        """Whether there is nothing but the reason why it could not be loaded."""
        return self.state is State.UNAVAILABLE and self.reason != UNLOADED


@dataclass(slots=True)
class ModelRecord:
    """One model. ``problem`` says why none of its versions can be loaded (a bad config, a duplicate).

    Strict readiness ``counts`` it unless it could not even be read, as Triton's does.
    ``fingerprint`` is of what it was loaded from, None if it is not loaded.
    """

    name: str
    versions: dict[int, VersionRecord] = field(default_factory=dict)
    problem: str = ""
    counts: bool = True
    fingerprint: Fingerprint | None = None

    @property
    def is_served(self) -> bool:
        """Whether requests may reach any version."""
        return any(version.served is not None for version in self.versions.values())

    @property
    def is_settled(self) -> bool:
        """Whether there is a version, and every one is ready or unloaded on purpose."""
        return bool(self.versions) and all(version.is_settled for version in self.versions.values())

    @property
    def is_alive(self) -> bool:
        """Whether every instance of what is served is alive."""
        return all(version.served is None or version.served.ready for version in self.versions.values())


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index; ``version`` and ``state`` are empty for a model never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


def index_of(record: ModelRecord, ready_only: bool) -> list[IndexEntry]:
    """The lines that ``record`` contributes to the index."""
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
    """``name`` is not there or its config is wrong; what is behind it follows, where there is more to say.

    It is the caller's fault if the caller brought what is wrong, and the server's otherwise.
    """
    text = f"failed to load '{name}', failed to poll from model repository" + (reason and f": {reason}")
    return InvalidArgument(text) if is_override else LoadError(text)


def versions_failure(name: str, failed: Mapping[int, HeadraceError]) -> OperatorError:
    """Versions could not be loaded: one clause for each."""
    clauses = "".join(f"version {n} is at UNAVAILABLE state: {reason(error)};\n" for n, error in failed.items())
    return OperatorError(f"load failed for model '{name}': {clauses}")


def reason(error: HeadraceError) -> str:
    """``error`` as the index shows it."""
    return f"{error.code.value}: {error.message}"


def unexpected(error: Exception) -> HeadraceError:
    """The error to be told for one that no backend should have let through."""
    log.error("unexpected error while loading", exc_info=error)
    failure = InternalError(summary(error))
    failure.__cause__ = error
    return failure


# ---------------------------------------------------------------------------
# The end of a model that takes no more requests, and the time it has
# ---------------------------------------------------------------------------


#: How long a model may take to end before it is told why it has not.
TELL_S = 10.0

#: Of the time that the server has to stop, or that is left of it. The rest is for killing.
_CLOSING_PART = 0.8


class ShutdownDeadline:
    """How long an instance in a process may take to close before it is killed.

    ``exit_timeout_s`` is how long the server may take to stop.
    """

    def __init__(self, exit_timeout_s: float) -> None:
        self._whole_s = exit_timeout_s
        self._ends: float | None = None

    def stopping(self) -> None:
        """The server has begun to stop: its time runs, and that of every instance with it."""
        self._ends = monotonic() + self._whole_s

    def __call__(self) -> float:
        """Seconds for an instance that is to close from now on."""
        left_s = self._whole_s if self._ends is None else self._ends - monotonic()
        return _CLOSING_PART * max(left_s, 0.0)


class Draining(NamedTuple):
    """A model on its way out, and the record that is told when it is gone."""

    record: VersionRecord
    model: ServedModel


async def drain(draining: Iterable[Draining], unloaded: Callable[[ServedModel], None]) -> None:
    """Let models answer what they have, and close them.

    ``unloaded`` is called for each, on the thread that has waited for its end. What fails is logged: a
    model whose end goes wrong is gone all the same, and keeps no other from ending. Event loop only.
    """
    await asyncio.gather(*(_drain_one(each, unloaded) for each in draining))


async def _drain_one(draining: Draining, unloaded: Callable[[ServedModel], None]) -> None:
    record, model = draining
    try:
        await _telling(model.drain(), draining, "waits for its requests")
    except Exception:
        log.exception("'%s' version %d did not wait for its requests", model.name, model.version)
    try:
        model.close()
        # It may take as long as it likes.
        closing = apart(partial(_end, model, unloaded), f"headrace-close-{model.name}")
        await _telling(closing, draining, "waits for the close of its instances")
        log.log(VERBOSE_2, "OnDestroy callback() '%s' version %d", model.name, model.version)
        log.info("successfully unloaded '%s' version %d", model.name, model.version)
    except Exception:
        log.exception("'%s' version %d did not close in order", model.name, model.version)
    record.state, record.reason = State.UNAVAILABLE, UNLOADED


async def _telling(work: Awaitable[None], draining: Draining, what: str) -> None:
    """Await ``work``; if it takes longer than `TELL_S`, say in the log and in the index what it waits for."""
    record, model = draining

    def tell() -> None:
        record.reason = f"{what} since {TELL_S:g} s{_busy(model)}"
        log.warning("'%s' version %d %s", model.name, model.version, record.reason)

    telling = asyncio.get_running_loop().call_later(TELL_S, tell)
    try:
        await work
    finally:
        telling.cancel()


def _busy(model: ServedModel) -> str:
    """Return which instances of ``model`` execute, and what can be done about it."""
    busy = [executor for executor in model.executors if executor.executing or executor.held]
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
