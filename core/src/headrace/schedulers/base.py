"""What a scheduler implements, and what it is given: the policy; `headrace.schedulers.kernel` does the rest."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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


class Scheduler(ABC):
    """Decides which requests run together, where and when. One object per version of a model.

    ``name`` selects it: the field of the config's ``scheduling_choice``, or the model's parameter ``scheduler``;
    ``direct`` where neither says anything. Every method runs on the event loop, with one exception (``on_threads``),
    and must not block. What is common to all schedulers is the kernel's: it keeps the requests that wait, sleeps,
    wakes, answers, and knows who has left.
    """

    name: ClassVar[str]
    #: A dataclass: what the model's parameters ``scheduler.FIELD`` may say.
    Parameters: ClassVar[type] = NoParameters
    #: Whether its models need instances to run on. One that does not may have no backend: then `next` is never called.
    needs_instances: ClassVar[bool] = True
    #: Whether `next` may also be called by the threads of instances, at the same time: it then takes what it
    #: chooses from ``waiting`` only. An instance that is busy all the time need not wait for the event loop.
    on_threads: ClassVar[bool] = False
    #: Whether no instance ever gets what another would not: then one is asked where all would be.
    instances_alike: ClassVar[bool] = False
    #: Whether what becomes of a request may depend on those that its caller has sent before, as in a sequence. One
    #: server must have them all, then: its models are refused where several share a port (``--workers``).
    is_stateful: ClassVar[bool] = False
    #: Whether answers are given in the order in which the requests came. Set before the first request.
    keeps_order: bool = False
    #: Outputs that the model gives for `finished` and not for the callers, by name. Set before the first request. One
    #: that is an output of the config is given to those callers, too, who ask for it or for all.
    kept: Mapping[str, Spec] = MappingProxyType({})
    #: What it has on the metrics page, for each version that it serves, beside what every model has there: `measure`.
    metrics: ClassVar[Sequence[PublishedMetric]] = ()
    #: Of outputs for which the model's config names no label file, the lines of one. Set before the first request.
    labels: Mapping[str, Sequence[str]] = MappingProxyType({})

    @classmethod
    def depends_on(cls, config: ModelConfig) -> Collection[Dependency]:
        """The models without which one of ``config`` cannot answer. They are loaded before it, it is loaded again when
        they are, and they answer until it has answered what it has. On a thread that may block, once per load."""
        return ()

    @classmethod
    def complete_config(cls, config: ModelConfig, others: Mapping[Dependency, OtherModel]) -> None:
        """Hold ``config`` against the models that it depends on, and write into it what follows from them.

        Raises `ConfigError` if they do not go together. ``headrace check`` asks without loading: then ``others`` lacks
        those whose configs leave out too much. On a thread that may block, once per version and load.
        """

    @classmethod
    def reschedules(cls, config: ModelConfig) -> bool:
        """Whether a model of ``config`` may have its requests run more than once, by `headrace.Rescheduled` in the
        place of their last answers: then they come back, by `rescheduled`. Else that is an error of the model."""
        return False

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context

    def submit(self, ticket: Ticket) -> int | None:
        """Take in the request of ``ticket``, or raise `Unavailable` to refuse it; then it is never heard of again.

        Returns the level at which it waits: 1 (None says the same) before 2 and so on. 0 keeps it from
        instances: then ``context.answer`` is this scheduler's to call, here or later. ``ticket.deadline_ns``, if set
        here, is when its time to wait is over: `expired`. ``ticket.queued_ns`` is now.
        """
        return None

    @abstractmethod
    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        """What ``instance``, which is idle, runs now: some of ``context.waiting``, at most its slots in rows.

        Empty if there is nothing for it; it is asked again after the next change. A `headrace.Batch` says more
        than a list does. `Wait` is for a batch that is not full enough.
        """

    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        """``instance`` has run ``ticket``, and its model wants it to be run once more: say as in `submit` at which
        level it waits, or raise what its caller is told. Then it is `finished`.

        ``outputs`` has what the model said of those that are ``kept``. ``ticket.request`` may be replaced by what the
        model is asked next, and ``ticket.deadline_ns`` may be set anew. All that a batch gives back comes before the
        instance is asked for again.
        """
        raise Rescheduled

    def continues(self, ticket: Ticket) -> bool:
        """Whether the request of ``ticket`` belongs to something that has begun. Asked while the server stops: such a
        one is submitted nevertheless, any other is refused."""
        return False

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
        """Hear what became of ``tickets``, before their callers do: ``instance`` ran them, or None: they left
        while they waited. The answers are all last ones, with the outputs that are ``kept``, which are taken out of
        them when this returns."""

    def instances_changed(self) -> None:
        """``context.instances`` has changed: some have come, others are leaving. A scheduler that overrides this, or
        whose ``instances_alike``, goes on while its model gets other instances; any other is made anew with them."""

    def lets_go(self, instance: InstanceInfo) -> bool:
        """Whether ``instance``, which is leaving, may go now: nothing is bound to it that it alone could run.

        Asked before `next` is, until it is True: so `next` goes on being asked what the instance runs."""
        return True

    def expired(self, ticket: Ticket) -> int | None:
        """The time of ``ticket`` to wait is over: None to reject it, or the level at which it waits on, without
        a deadline and behind all others there."""
        return None

    def measure(self) -> Mapping[str, float]:
        """What each of ``metrics`` is now, by its name. Asked when somebody reads the metrics page, and never for a
        request. If it raises, the page does without what this scheduler has there."""
        return {}

    def close(self) -> None:
        """No more requests come: cancel what was asked of the clock. Those that run may still be `finished`."""


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
