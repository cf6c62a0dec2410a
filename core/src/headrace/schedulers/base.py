"""What a scheduler implements, and what it is given: the policy; `headrace.schedulers.kernel` does the rest."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

from headrace.backends.base import Device, NoParameters
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.parse import clip
from headrace.errors import ConfigError, InternalError, Rescheduled
from headrace.messages.response import Answer
from headrace.messages.spec import Spec
from headrace.messages.tensor import Tensor
from headrace.messages.ticket import Ticket
from headrace.telemetry.published import PublishedMetric


class Timer(Protocol):
    """A call that is still to come."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Time as schedulers see it. The server's is the monotonic clock; a test turns its own."""

    def now_ns(self) -> int: ...

    def call_later(self, delay_ns: int, call: Callable[..., object], *arguments: object) -> Timer:
        """Call on the event loop in ``delay_ns``. Event loop only."""


class LoopClock:
    """The server's `Clock`: the monotonic clock, and the timers of ``loop``."""

    now_ns = staticmethod(monotonic_ns)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call_later(self, delay_ns: int, call: Callable[..., object], *arguments: object) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_ns / 1e9, call, *arguments)


class Waiting(Protocol):
    """The requests that wait for an instance: lower levels first, each level in order of arrival.

    Reading is safe on any thread. The kernel alone adds and removes.
    """

    def __len__(self) -> int: ...

    def __contains__(self, ticket: Ticket) -> bool: ...

    def __iter__(self) -> Iterator[Ticket]: ...

    def head(self, count: int) -> tuple[Ticket, ...]:
        """The first ``count`` of them."""

    def size(self, level: int) -> int:
        """How many wait at ``level``."""


class Occupancy(Protocol):
    """How busy the instances of a version are. Any thread."""

    @property
    def in_flight(self) -> int:
        """Requests that wait or are executed, and those whose answers are on their way."""

    @property
    def at_once(self) -> int:
        """Executions that the instances can run side by side."""

    @property
    def last_ns(self) -> int:
        """How long the last execution took, of whichever instance; 0 before the first."""


@dataclass(frozen=True, slots=True, eq=False)
class InstanceInfo:
    """An instance that runs batches. ``slots`` is how many rows it takes in one execution, 1 for a model without
    a batch axis. Compared and hashed by identity."""

    name: str
    device: Device
    slots: int = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run yet: ask again in ``delay_ns``, or when ``rows`` more have arrived, or something else changed."""

    delay_ns: int
    rows: int = 1


class Dependency(NamedTuple):
    """Another model that a version needs to answer: by name, and by version, -1 for the latest that is served."""

    model: str
    version: int = -1


def _nobody_to_ask(ticket: Ticket) -> None:
    """The ``ask`` of a model that is known by its config only."""
    raise InternalError(f"model '{ticket.request.model_name}' is not loaded")


@dataclass(frozen=True, slots=True, eq=False)
class OtherModel:
    """A version of another model, for those who depend on it: it serves until they have answered their last request.

    ``config`` is complete. ``labels`` maps an output to the lines of its label file. ``ask`` has the version answer a
    request by its ticket's ``respond``, and raises the `HeadraceError` that refuses it; then it is not answered. It is
    for the event loop.
    """

    config: ModelConfig
    version: int
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ask: Callable[[Ticket], None] = _nobody_to_ask


@dataclass(frozen=True, slots=True)
class HeldUntil:
    """For tests of a server: until when nothing is run, so that a test knows what runs together. 0 holds nothing.

    ``requests``: so many must wait for an instance at once. ``backlog``: so many must wait behind those, where a
    scheduler lets only some requests come up to the instances. Once that has been so, nothing is held any more.
    """

    requests: int = 0
    backlog: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> HeldUntil:
        """What ``TRITONSERVER_DELAY_SCHEDULER`` and ``TRITONSERVER_BACKLOG_DELAY_SCHEDULER`` say
        (docs/spec/behaviours.md section 14.1). Raises `ConfigError`."""
        return cls(*(_count(environ, f"TRITONSERVER_{name}DELAY_SCHEDULER") for name in ("", "BACKLOG_")))


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"the environment variable {name} is '{clip(text)}', expected a number of requests")
    return int(text)


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """What a scheduler works with: one version of a model. The calls are for the event loop.

    ``instances`` is empty for a model that has none, and always those of now: see `Scheduler.instances_changed`.
    ``parameters`` is the scheduler's own ``Parameters``.
    """

    config: ModelConfig
    parameters: Any
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    instances: Sequence[InstanceInfo]
    clock: Clock
    waiting: Waiting
    occupancy: Occupancy
    #: Have another model answer a request, by its ticket's ``respond``; a refusal is an answer.
    call: Callable[[Ticket], None]
    #: Give a request that no instance has an answer: ``answer(request, answer, final)``. Of one that waited,
    #: `Unavailable` counts as rejected, and `Cancelled` as cancelled. Its time counts as waiting until
    #: ``ticket.started_ns``, if that is set, or until now, and from there on as computing.
    answer: Callable[[Ticket, Answer, bool], None]
    #: Something changed that nobody else has noticed: have `Scheduler.next` asked for all who are idle, soon.
    ask_again: Callable[[], None]
    #: For tests of a server; a scheduler that batches follows it.
    held_until: HeldUntil = HeldUntil()
    #: What `Scheduler.depends_on` has named, loaded.
    others: Mapping[Dependency, OtherModel] = field(default_factory=dict)
    #: Where the model lies in its repository, with its config and its versions; None for one that lies nowhere.
    directory: Path | None = None


#: What `FullScheduler` adds to `Scheduler`.
_ONLY_FULL: set[str] = set()


class Scheduler(ABC):
    """Decides which requests run together, where and when. One object per version of a model.

    This is all that a policy needs: it takes a request in (`submit`), says what an instance runs (`next`), and is told
    the results (`finished`). `FullScheduler` has more. ``name`` selects the scheduler: the field of the config's
    ``scheduling_choice``, or the model's parameter ``scheduler``; ``direct`` if neither is there. Every method runs on
    the event loop, with one exception (``on_threads``), and must not block. The kernel does the rest for all
    schedulers: it keeps the requests that wait, sleeps, wakes, answers, and removes requests that are cancelled.
    """

    name: ClassVar[str]
    #: A dataclass: what the model's parameters ``scheduler.FIELD`` may say.
    Parameters: ClassVar[type] = NoParameters
    #: True if the threads of instances may call `next`, too, at the same time. It then takes what it chooses from
    #: ``waiting`` only, and a busy instance need not wait for the event loop.
    on_threads: ClassVar[bool] = False
    #: True if every instance gets what any other would get. Then the kernel asks for one where it would ask for all.
    instances_alike: ClassVar[bool] = False
    #: True if the result of a request may depend on earlier requests of its caller, as in a sequence. Then one server
    #: must have them all: the models are refused where several servers share a port (``--workers``).
    is_stateful: ClassVar[bool] = False

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a class that defines what only a `FullScheduler` is asked for."""
        super().__init_subclass__(**given)
        if _ONLY_FULL and not issubclass(cls, FullScheduler):
            _refuse_ignored(cls, dir(cls))

    def submit(self, ticket: Ticket) -> int | None:
        """Take in the request of ``ticket``, or raise `Unavailable` to refuse it. A refused request is over.

        Return the level at which it waits: 1 (None is the same) before 2 and so on. 0 keeps it from
        instances: then the scheduler calls ``context.answer``, here or later. ``ticket.deadline_ns``, if set
        here, is when its time to wait is over. ``ticket.queued_ns`` is now.
        """
        return None

    @abstractmethod
    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        """Return what ``instance``, which is idle, runs now: some of ``context.waiting``, at most its slots in rows.

        Return nothing if there is nothing for it: it is asked again after the next change. A `headrace.Batch` says more
        than a list does. `Wait` is for a batch that is not full enough.
        """

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
        """Called with the last answers of ``tickets``, before their callers get them. ``instance`` ran them. It is None
        for requests that were cancelled, rejected or expired while they waited. The answers have the outputs that are
        ``kept``, which are removed when this returns."""


class FullScheduler(Scheduler):
    """A `Scheduler` with all that the kernel may ask of one. Everything has a default: override what you need."""

    #: False if its models run without instances. They may have no backend, and `next` is never called.
    needs_instances: ClassVar[bool] = True
    #: What it publishes on the metrics page for each version that it serves: `measure`.
    metrics: ClassVar[Sequence[PublishedMetric]] = ()
    #: True if answers are given in the order in which the requests came. Set before the first request.
    keeps_order: bool = False
    #: Outputs that the model gives for `finished` and not for the callers, by name. Set before the first request. A
    #: kept output of the config also goes to the callers that ask for it or for all.
    kept: Mapping[str, Spec] = MappingProxyType({})
    #: The lines of a label file, for outputs without one in the model's config. Set before the first request.
    labels: Mapping[str, Sequence[str]] = MappingProxyType({})

    # ------------------------------------------------------------------ the config, once per load

    @classmethod
    def depends_on(cls, config: ModelConfig) -> Collection[Dependency]:
        """Return the models without which one of ``config`` cannot answer. They are loaded before it, and serve until
        it has answered its last request. When they are loaded again, so is it. On a thread that may block."""
        return ()

    @classmethod
    def complete_config(cls, config: ModelConfig, others: Mapping[Dependency, OtherModel]) -> None:
        """Check ``config`` against the models that it depends on, and write into it what follows from them.

        Raises `ConfigError` if they do not fit. ``headrace check`` calls this without loading: then ``others`` lacks
        the models whose configs are incomplete. On a thread that may block, once per version and load.
        """

    @classmethod
    def reschedules(cls, config: ModelConfig) -> bool:
        """Return True if a model of ``config`` may have its requests run more than once. It returns
        `headrace.Rescheduled` in the place of the last answer, and the request comes back by `rescheduled`. Otherwise
        that is an error of the model."""
        return False

    # ------------------------------------------------------------------ requests

    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        """Take back ``ticket``, which ``instance`` has run and whose model wants it to be run once more.

        Return as in `submit` at which level it waits, or raise what its caller gets; then it is `finished`.
        ``outputs`` has the outputs that are ``kept``. ``ticket.request`` may be replaced by what the
        model is asked next, and ``ticket.deadline_ns`` may be set again. All requests of a batch come back before the
        instance is asked for again.
        """
        raise Rescheduled

    def continues(self, ticket: Ticket) -> bool:
        """Return True if the request of ``ticket`` belongs to something that has begun. Called while the server stops:
        it is then submitted, and any other request is refused."""
        return False

    def expired(self, ticket: Ticket) -> int | None:
        """Return None to reject ``ticket``, whose time to wait is over, or the level at which it waits on, without
        a deadline and behind all others there."""
        return None

    # ------------------------------------------------------------------ instances

    def instances_changed(self) -> None:
        """``context.instances`` has changed: some were added, others are leaving. A scheduler that overrides this, or
        whose ``instances_alike``, stays while its model gets other instances. Any other is made anew with them."""

    def lets_go(self, instance: InstanceInfo) -> bool:
        """Return True if ``instance``, which is leaving, may go now: no request is bound to it.

        Called before `next`, until it is True. `next` is asked meanwhile what the instance runs."""
        return True

    # ------------------------------------------------------------------ metrics, and the end

    def measure(self) -> Mapping[str, float]:
        """Return the value of each of ``metrics`` by its name. Called when the metrics page is read, and never for a
        request. If it raises, the page has no metrics of this scheduler."""
        return {}

    def close(self) -> None:
        """Cancel what was asked of the clock: no more requests come. Running requests may still be `finished`."""


_ONLY_FULL.update(name for name in vars(FullScheduler) if not name.startswith("_"))


class _Defaults(FullScheduler):
    """Stands beside a `Scheduler` that is no `FullScheduler`."""

    name = "defaults"

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket]:
        raise AssertionError("the kernel asks the scheduler itself")


def full(scheduler: Scheduler) -> FullScheduler:
    """Return ``scheduler`` if it is a `FullScheduler`, else one with the defaults.

    Raises `TypeError` if ``scheduler`` has set what only a `FullScheduler` may have.
    """
    if isinstance(scheduler, FullScheduler):
        return scheduler
    _refuse_ignored(type(scheduler), getattr(scheduler, "__dict__", ()))
    return _Defaults(scheduler.context)


def _refuse_ignored(kind: type[Scheduler], names: Iterable[str]) -> None:
    if ignored := ", ".join(sorted(_ONLY_FULL.intersection(names))):
        raise TypeError(f"scheduler class {kind.__name__} has {ignored}, which only a FullScheduler may have")


def full_class(kind: type[Scheduler]) -> type[FullScheduler]:
    """Return what declares everything for ``kind``: itself, or `FullScheduler` with its defaults."""
    return kind if issubclass(kind, FullScheduler) else FullScheduler


def nobody_to_call(ticket: Ticket) -> None:
    """The ``call`` of a context that has no server."""
    raise InternalError("this scheduler runs without a server: there are no other models")


@dataclass(frozen=True, slots=True)
class ScheduledModel:
    """What the kernel is told of the version that it serves. ``parameters`` is the scheduler's ``Parameters``."""

    config: ModelConfig
    instances: Sequence[InstanceInfo] = ()
    inputs: Mapping[str, Spec] = field(default_factory=dict)
    outputs: Mapping[str, Spec] = field(default_factory=dict)
    call: Callable[[Ticket], None] = nobody_to_call
    parameters: Any = None
    held_until: HeldUntil = HeldUntil()
    others: Mapping[Dependency, OtherModel] = field(default_factory=dict)
    version: str = ""
    directory: Path | None = None
