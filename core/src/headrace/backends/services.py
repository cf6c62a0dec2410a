"""The server's services for the instances of its models: `Model.services`.

An instance in a thread of the server and one in a process of its own get the same methods. Call them on any thread
except the event loop. Source: docs/spec/behaviours.md sections 9.2 and 9.5.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, ClassVar, Final, Literal, TypeAlias

from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.telemetry.series import MetricKind, MetricOperation

LogLevel: TypeAlias = Literal["error", "warning", "info", "verbose"]
#: The levels of `logging`, most severe first.
LOG_LEVELS: Final[Mapping[LogLevel, int]] = {
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
}


class Services(ABC):
    """Other models, the log, and the model's own metrics."""

    #: True if answers are in the memory of the models that gave them, and must not be written to.
    shares_memory: ClassVar[bool] = True
    #: True if requests may bring `DeviceTensor`s, and get some: see `Ticket.on_device`.
    passes_device_tensors: ClassVar[bool] = False

    @abstractmethod
    def infer(self, ticket: Ticket) -> None:
        """Send a request to another model. Never raises: a refusal is an answer, too.

        ``ticket.respond`` is called on a thread of the services and must not block. The request's ``callers`` must end
        with the name of the calling model, after the models that wait for it.
        """

    def ask(self, request: InferRequest) -> Answer:
        """Do as `infer` and wait. Return the last response or error; None if there was none."""
        sleeper = _Sleeper()
        ticket = Ticket(request, sleeper.respond)
        ticket.respond_at_once = sleeper.respond_at_once
        self.infer(ticket)
        return sleeper.wait()

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """Cancel ``ticket``: its answer is not needed any more."""

    @abstractmethod
    def stop(self, ticket: Ticket) -> None:
        """Request the model of ``ticket`` to stop. Answers that it still sends are delivered."""

    @abstractmethod
    def read(self, ticket: Ticket) -> None:
        """Count one response of ``ticket``, not the last, as read (`Ticket.read`)."""

    @abstractmethod
    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load or reload a model. ``config`` is JSON or empty; ``files`` maps ``file:<path>`` to contents.

        Blocks until it is done. Raises `HeadraceError`.
        """

    @abstractmethod
    def unload_model(self, name: str, unload_dependents: bool) -> None:
        """Unload a model. Returns when it takes no more requests. Raises `HeadraceError`."""

    @abstractmethod
    def is_model_ready(self, name: str, version: str) -> bool:
        """True if that version (empty: any) would take requests. Raises `HeadraceError`."""

    @abstractmethod
    def log(self, level: LogLevel, message: str, file: str, line: int) -> None:
        """Write one line to the server's log, as from ``line`` of ``file``."""

    @abstractmethod
    def metric_family(self, name: str, description: str, kind: MetricKind) -> int:
        """Return the handle of the family ``name``, which is created if needed. Raises `HeadraceError`."""

    @abstractmethod
    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        """Return the handle of the metric of ``family`` with ``labels``, which is created if needed.

        Raises `HeadraceError`.
        """

    @abstractmethod
    def update_metric(self, metric: int, operation: MetricOperation, value: float, times: int = 1) -> None:
        """Change a metric, ``times`` times. Raises `HeadraceError` if the operation or the value does not fit."""

    @abstractmethod
    def metric_value(self, metric: int) -> float:
        """Return the value of a counter or a gauge. Raises `HeadraceError` for a histogram."""

    @abstractmethod
    def release(self, handle: int) -> None:
        """Release a metric or a family. When all its users have, it is removed from the page."""


class LoopServices(Services):
    """Services in the server's process, which an executor on the event loop can call."""

    #: Returns the `headrace.ModelView` of a version that is loaded (empty: the latest). Raises `HeadraceError`.
    find: Callable[[str, str], Any]

    @abstractmethod
    def submit(self, ticket: Ticket) -> None:
        """`infer` on the event loop, at once. If the request is refused, it is answered before this returns."""


class _Sleeper:
    """Waits on a thread for one answer."""

    __slots__ = ("_answer", "_has_answered", "_lock")

    def __init__(self) -> None:
        self._answer: Answer = None
        self._has_answered = False
        self._lock = Lock()
        self._lock.acquire()

    def wait(self) -> Answer:
        with self._lock:
            return self._answer

    def respond(self, answer: Answer, final: bool) -> None:
        if self._has_answered:
            return
        if answer is not None:
            self._answer = answer
        if final:
            self._lock.release()

    def respond_at_once(self, answer: InferResponse) -> None:
        self._answer = answer
        self._has_answered = True
        self._lock.release()
