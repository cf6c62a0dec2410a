"""What the server does for the instances of its models: `Model.services`.

An instance in a thread of the server and one in a process of its own are given the same methods;
all may be called from any thread except the event loop. Source: docs/spec/behaviours.md sections 9.2 and 9.5.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import ClassVar, Final, Literal, TypeAlias

from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.telemetry.series import MetricKind, MetricOperation

LogLevel: TypeAlias = Literal["error", "warning", "info", "verbose"]
#: The same in `logging`, most severe first.
LOG_LEVELS: Final[Mapping[LogLevel, int]] = {
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
}


class Services(ABC):
    """Other models, the log, and metrics of the model's own."""

    #: Whether answers are the memory of the models that gave them, and not to be written to.
    shares_memory: ClassVar[bool] = True

    @abstractmethod
    def infer(self, ticket: Ticket) -> None:
        """Ask another model. Never raises: a refusal is an answer, too.

        ``ticket.respond`` is called on a thread of the services and must not block.
        ``callers`` of its request must name the model that asks, after those that wait for it.
        """

    def ask(self, request: InferRequest) -> Answer:
        """`infer` for a thread that waits: the last answer that said something, None if none did."""
        sleeper = _Sleeper()
        ticket = Ticket(request, sleeper.respond)
        ticket.respond_at_once = sleeper.respond_at_once
        self.infer(ticket)
        return sleeper.wait()

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for ``ticket`` any more."""

    @abstractmethod
    def stop(self, ticket: Ticket) -> None:
        """No more of ``ticket`` is wanted: its model is told. What it answers nevertheless is taken."""

    @abstractmethod
    def read(self, ticket: Ticket) -> None:
        """One response of ``ticket`` that was not the last has been taken (`Ticket.read`)."""

    @abstractmethod
    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load or reload; ``config`` is JSON or empty, ``files`` maps ``file:<path>`` to contents.

        Blocks until it is done. Raises `HeadraceError`.
        """

    @abstractmethod
    def unload_model(self, name: str, unload_dependents: bool) -> None:
        """Unload; returns once the model takes no more requests. Raises `HeadraceError`."""

    @abstractmethod
    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether requests to that version (empty: any) would be taken. Raises `HeadraceError`."""

    @abstractmethod
    def log(self, level: LogLevel, message: str, file: str, line: int) -> None:
        """One line in the server's log, as coming from ``line`` of ``file``."""

    @abstractmethod
    def metric_family(self, name: str, description: str, kind: MetricKind) -> int:
        """The family ``name``, made if need be. Returns its handle. Raises `HeadraceError`."""

    @abstractmethod
    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        """The metric of ``family`` with ``labels``, made if need be. Returns its handle.

        Raises `HeadraceError`.
        """

    @abstractmethod
    def update_metric(self, metric: int, operation: MetricOperation, value: float) -> None:
        """Change a metric. Raises `HeadraceError` where the operation or the value does not fit its kind."""

    @abstractmethod
    def metric_value(self, metric: int) -> float:
        """The value of a counter or a gauge. Raises `HeadraceError` for a histogram."""

    @abstractmethod
    def release(self, handle: int) -> None:
        """Give up a metric or a family; the last to do so takes it off the page."""


class _Sleeper:
    """A thread that waits for one answer."""

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
