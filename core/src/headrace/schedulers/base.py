"""The interface of a scheduler: `Scheduler`, `FullScheduler`, and the `SchedulerContext` that each object gets.

A scheduler is the policy only. `headrace.schedulers.model_queue` does everything else.
"""

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
from headrace.config.validation.shared import Problem
from headrace.errors import ConfigError, InternalError, Rescheduled
from headrace.messages.response import Answer
from headrace.messages.spec import Spec
from headrace.messages.tensor import Tensor
from headrace.messages.ticket import Ticket
from headrace.telemetry.published import Measured, PublishedMetric


class Timer(Protocol):
    """A call that is scheduled and can be cancelled."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The time for schedulers. The server uses the monotonic clock; a test uses a clock that it moves itself."""

    def now_ns(self) -> int: ...

    def call_later(self, delay_ns: int, call: Callable[..., object], *arguments: object) -> Timer:
        """Call ``call(*arguments)`` on the event loop after ``delay_ns``. Event loop only."""


class LoopClock:
    """The server's `Clock`: the monotonic clock, and the timers of ``loop``."""

    now_ns = staticmethod(monotonic_ns)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call_later(self, delay_ns: int, call: Callable[..., object], *arguments: object) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_ns / 1e9, call, *arguments)


class Waiting(Protocol):
    """The requests that wait for an instance: lower levels first, each level in order of arrival.

    Any thread may read it. Only the model queue adds and removes requests.
    """

    def __len__(self) -> int: ...

    def __contains__(self, ticket: Ticket) -> bool: ...

    def __iter__(self) -> Iterator[Ticket]: ...

    def head(self, count: int) -> tuple[Ticket, ...]:
        """Return the first ``count`` requests."""

    def size(self, level: int) -> int:
        """Return the number of requests that wait at ``level``."""


class Occupancy(Protocol):
    """The load of the instances of a version. Any thread may read it."""

    @property
    def in_flight(self) -> int:
        """Requests that wait, that are executed, or whose responses are not delivered yet."""

    @property
    def at_once(self) -> int:
        """Executions that the instances can run at the same time."""

    @property
    def last_ns(self) -> int:
        """Duration of the last execution, on any instance; 0 before the first."""


@dataclass(frozen=True, slots=True, eq=False)
class InstanceInfo:
    """An instance that runs batches. Compared and hashed by identity.

    ``slots`` is the number of rows that it takes in one execution: 1 for a model without a batch axis.
    """

    name: str
    device: Device
    slots: int = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """Run nothing yet. `Scheduler.next` is called again after ``delay_ns``, or when ``rows`` more have arrived, or when
    something else has changed."""

    delay_ns: int
    rows: int = 1


class Dependency(NamedTuple):
    """Another model that a version needs. ``version`` is -1 for the latest version that is served."""

    model: str
    version: int = -1


def _refuse_unloaded(ticket: Ticket) -> None:
    """Refuse the request: the default ``ask`` of a model that is not loaded."""
    raise InternalError(f"model '{ticket.request.model_name}' is not loaded")


@dataclass(frozen=True, slots=True, eq=False)
class OtherModel:
    """A version of another model, for a model that depends on it.

    It serves until the dependent model has answered its last request. ``config`` is complete. ``labels`` maps an output
    to the lines of its label file.

    ``ask`` sends a request to this model, which answers by the ticket's ``respond``. It raises a `HeadraceError` to
    refuse the request, which then gets no response. Event loop only.
    """

    config: ModelConfig
    version: int
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ask: Callable[[Ticket], None] = _refuse_unloaded
    #: The inputs that may be `headrace.DeviceTensor`s; outputs may be by `Ticket.on_device`. None: all are arrays.
    takes_device_tensors: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class DelayedStart:
    """Start no execution until enough requests wait. For tests of a server that need to choose what runs together.

    ``requests`` is how many must wait for an instance at the same time. ``backlog`` is how many must wait behind those,
    for a scheduler that admits only some requests to the instances. 0 delays nothing. When both numbers have been
    reached once, the delay is over for good.
    """

    requests: int = 0
    backlog: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> DelayedStart:
        """Read ``TRITONSERVER_DELAY_SCHEDULER`` and ``TRITONSERVER_BACKLOG_DELAY_SCHEDULER``.

        Raises `ConfigError`. Source: docs/spec/behaviours.md section 14.1.
        """
        names = "TRITONSERVER_DELAY_SCHEDULER", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"
        return cls(*(_count(environ, name) if name in environ else 0 for name in names))


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"the environment variable {name} is '{clip(text)}', expected a number of requests")
    return int(text)


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """Everything that a scheduler works with, for one version of a model. Call its functions on the event loop only.

    ``instances`` always has the current instances, and is empty for a model without any: see
    `Scheduler.instances_changed`. ``parameters`` is an object of the scheduler's own ``Parameters``.
    """

    config: ModelConfig
    parameters: Any
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    instances: Sequence[InstanceInfo]
    clock: Clock
    waiting: Waiting
    occupancy: Occupancy
    #: Send a request to another model, which answers by the ticket's ``respond``. A refusal is a response, too.
    call: Callable[[Ticket], None]
    #: Answer a request that no instance runs: ``answer(request, answer, final)``.
    #:
    #: If the request waited, `Unavailable` counts as rejected and `Cancelled` as cancelled. Its time counts as waiting
    #: until ``ticket.started_ns`` (until now, if that is not set), and as computing after that.
    answer: Callable[[Ticket, Answer, bool], None]
    #: Call `Scheduler.next` soon for all idle instances. For changes that no request and no execution causes.
    ask_again: Callable[[], None]
    #: For tests of a server. A scheduler that batches obeys it.
    delayed_start: DelayedStart = DelayedStart()
    #: The loaded models that `Scheduler.depends_on` has named.
    others: Mapping[Dependency, OtherModel] = field(default_factory=dict)
    #: The model's directory in its repository, with its config and versions. None if it has none.
    directory: Path | None = None


#: The names that `FullScheduler` adds to `Scheduler`.
_ONLY_FULL: set[str] = set()


class Scheduler(ABC):
    """Decides which requests run together, where and when. One object per version of a model.

    A policy needs three methods: `submit` takes in a request, `next` returns what an instance runs, and `finished` gets
    the results. `FullScheduler` has more. The model queue does everything else: it keeps the waiting requests, sets
    timers, wakes instances, delivers responses, and removes cancelled requests.

    ``name`` selects the scheduler: by the field of the config's ``scheduling_choice``, else by the model's parameter
    ``scheduler``, else ``direct``. Every method runs on the event loop and must not block. Exception: ``on_threads``.
    """

    name: ClassVar[str]
    #: A dataclass with a field for each parameter ``scheduler.FIELD`` of the model.
    Parameters: ClassVar[type] = NoParameters
    #: True if the threads of instances may call `next` too, at the same time. `next` must then choose from ``waiting``
    #: only, and is not called while nothing waits. In return, a busy instance need not wait for the event loop.
    on_threads: ClassVar[bool] = False
    #: True if `next` returns the same for every instance. The model queue then asks for one instance instead of for
    #: all.
    instances_alike: ClassVar[bool] = False
    #: True if a result may depend on earlier requests of the same caller, as in a sequence. One server must then get
    #: all of them: such a model is refused where several servers share a port (``--workers``).
    is_stateful: ClassVar[bool] = False

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a class that defines what only a `FullScheduler` may have."""
        super().__init_subclass__(**arguments)
        if _ONLY_FULL and not issubclass(cls, FullScheduler):
            _refuse_ignored(cls, dir(cls))

    def submit(self, ticket: Ticket) -> int | None:
        """Accept the request of ``ticket``, or raise `Unavailable` to refuse it.

        Return the level at which it waits: 1 (or None) is served before 2, and so on. If the level is 0, no instance
        gets the request, and the scheduler answers it by ``context.answer``, now or later. To limit the waiting time,
        set ``ticket.deadline_ns``. ``ticket.queued_ns`` is the present time.
        """
        return None

    @abstractmethod
    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        """Return what ``instance``, which is idle, runs now: requests from ``context.waiting``, at most its slots in
        rows.

        Return an empty list if there is nothing to run: `next` is called again after the next change. Return `Wait` if
        the batch is to become fuller. Return a `headrace.Batch` to say more than a list can.
        """

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
        """Called with the last answers of ``tickets``, before they are delivered.

        ``instance`` ran the requests. It is None for requests that were cancelled, rejected or expired while they
        waited. The answers still have the outputs that are ``kept``; they are removed when this returns. Not called for
        requests that the scheduler answers itself by ``context.answer``.
        """


class FullScheduler(Scheduler):
    """A `Scheduler` with everything that the model queue can call. Everything has a default: override what you
    need."""

    #: False if its models run without instances. They may then have no backend, and `next` is never called.
    needs_instances: ClassVar[bool] = True
    #: The metrics of each version that it serves. `measure` returns their values.
    metrics: ClassVar[Sequence[PublishedMetric]] = ()
    #: True if responses are delivered in the order of the requests. Set it before the first request.
    keeps_order: bool = False
    #: Outputs that every batch computes for `finished`, by name. Set it before the first request. Callers get a kept
    #: output only if the config declares it, and if they ask for it or for all outputs.
    kept: Mapping[str, Spec] = MappingProxyType({})
    #: Labels of outputs that have no label file in the model's config. Set it before the first request.
    labels: Mapping[str, Sequence[str]] = MappingProxyType({})
    #: `OtherModel.takes_device_tensors` of its models, if they run without instances. Set it before the first request.
    takes_device_tensors: Collection[str] | None = None

    # ------------------------------------------------------------------ the config, once per load

    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        """Return every problem of the scheduler's own fields of ``config``: the first one refuses the load.

        Called twice per load, and by ``headrace check``: first with ``completed`` False, when the backend may still add
        to the config, then with the final config. Only enum values are known to be valid. ``config`` must not be
        changed. Runs on a thread that may block.
        """
        return ()

    @classmethod
    def depends_on(cls, config: ModelConfig) -> Collection[Dependency]:
        """Return the models that a model with ``config`` needs. Runs on a thread that may block.

        They are loaded before it, and serve until it has answered its last request. When they are loaded again, it is
        too.
        """
        return ()

    @classmethod
    def complete_config(cls, config: ModelConfig, others: Mapping[Dependency, OtherModel]) -> None:
        """Check ``config`` against the models that it depends on, and complete it from theirs.

        Raises `ConfigError` if they do not fit together. ``headrace check`` calls this without loading: ``others`` then
        lacks the models with incomplete configs. Runs on a thread that may block, once per version and load.
        """

    @classmethod
    def reschedules(cls, config: ModelConfig) -> bool:
        """Return True if a model with ``config`` may run a request more than once.

        It then returns `headrace.Rescheduled` instead of the last response, and the model queue calls `rescheduled`.
        Otherwise `headrace.Rescheduled` is an error of the model.
        """
        return False

    # ------------------------------------------------------------------ requests

    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        """Take back ``ticket``: ``instance`` has executed it, and the model asks for one more execution.

        Return the level at which it waits, as `submit` does. Or raise the error that its caller gets; `finished`
        follows. ``outputs`` has the outputs that are ``kept``. ``ticket.request`` may be replaced by the model's next
        request, and ``ticket.deadline_ns`` may be set again. All requests of a batch come back before `next` is called
        for the instance.
        """
        raise Rescheduled

    def continues(self, ticket: Ticket) -> bool:
        """Return True if the request of ``ticket`` continues work that has begun, such as a sequence.

        Called while the server stops: such a request is still submitted, every other one is refused.
        """
        return False

    def expired(self, ticket: Ticket) -> int | None:
        """Decide about ``ticket``, whose deadline has passed while it waited.

        Return None to reject it. Or return the level at which it goes on waiting: without a deadline, behind all others
        there.
        """
        return None

    # ------------------------------------------------------------------ instances

    def instances_changed(self) -> None:
        """Called when ``context.instances`` has changed: some were added, others are being removed.

        A scheduler that overrides this, or that is ``instances_alike``, is kept when its model gets other instances.
        Any other scheduler is created anew with them.
        """

    def lets_go(self, instance: InstanceInfo) -> bool:
        """Return True if ``instance``, which is being removed, may close now because no request is bound to it.

        Called before each `next` until it returns True. Until then, `next` returns what the instance runs.
        """
        return True

    # ------------------------------------------------------------------ metrics, and the end

    def measure(self) -> Mapping[str, Measured]:
        """Return the value of each of ``metrics`` by name.

        Called when the metrics page is read, and never for a request. If it raises, the page has no metrics of this
        scheduler.
        """
        return {}

    def close(self) -> None:
        """Cancel all timers: no more requests arrive. `finished` may still be called for running requests."""


_ONLY_FULL.update(name for name in vars(FullScheduler) if not name.startswith("_"))


class _Defaults(FullScheduler):
    """The defaults for a `Scheduler` that is not a `FullScheduler`."""

    name = "defaults"

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket]:
        raise AssertionError("the model queue calls the scheduler itself")


def with_defaults(scheduler: Scheduler) -> FullScheduler:
    """Return ``scheduler`` if it is a `FullScheduler`, else a `FullScheduler` with the defaults.

    Raises `TypeError` if ``scheduler`` has set an attribute that only a `FullScheduler` may have.
    """
    if isinstance(scheduler, FullScheduler):
        return scheduler
    _refuse_ignored(type(scheduler), getattr(scheduler, "__dict__", ()))
    return _Defaults(scheduler.context)


def _refuse_ignored(kind: type[Scheduler], names: Iterable[str]) -> None:
    if ignored := ", ".join(sorted(_ONLY_FULL.intersection(names))):
        raise TypeError(f"scheduler class {kind.__name__} has {ignored}, which only a FullScheduler may have")


def full_scheduler_class(kind: type[Scheduler]) -> type[FullScheduler]:
    """Return the class that has every declaration for ``kind``: itself, or `FullScheduler` with its defaults."""
    return kind if issubclass(kind, FullScheduler) else FullScheduler


def refuse_call(ticket: Ticket) -> None:
    """Raise `InternalError`: the ``call`` of a context without a server."""
    raise InternalError("this scheduler runs without a server: there are no other models")


@dataclass(frozen=True, slots=True)
class ScheduledModel:
    """A version of a model, for its model queue. ``parameters`` is an object of the scheduler's
    ``Parameters``."""

    config: ModelConfig
    instances: Sequence[InstanceInfo] = ()
    inputs: Mapping[str, Spec] = field(default_factory=dict)
    outputs: Mapping[str, Spec] = field(default_factory=dict)
    call: Callable[[Ticket], None] = refuse_call
    parameters: Any = None
    delayed_start: DelayedStart = DelayedStart()
    others: Mapping[Dependency, OtherModel] = field(default_factory=dict)
    version: str = ""
    directory: Path | None = None
