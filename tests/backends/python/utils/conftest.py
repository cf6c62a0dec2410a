"""Fixtures of the tests of pb_utils: a call that keeps its answers, and a server of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, TypeAlias

import numpy as np
import pytest

from headrace.backends.base import Call
from headrace.backends.services import LogLevel, Services
from headrace.errors import HeadraceError, NotFound
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.tensor import Tensor
from headrace.messages.ticket import Ticket
from triton_python_backend_utils.metrics import MetricsInMemory
from triton_python_backend_utils.runtime import ModelPhase, Runtime

#: Answers to one request: each is sent when the iterator yields it; the end of the iterator ends the request.
Model: TypeAlias = Callable[[InferRequest], Iterator[Answer]]


class Recorded(Call):
    """A request as an instance accepts it; ``answers`` are those given, each with whether it was the last.

    With a ``gate``, answers that are not the last wait for it, as for a caller that does not read;
    ``began`` is set then.
    """

    gate: Event | None = None

    def __init__(self, inputs: Mapping[str, Tensor] | None = None, model: str = "counted", **fields: Any) -> None:
        self.ticket = Ticket(InferRequest(model, dict(inputs or {}), **fields), lambda answer, final: None)
        self.request = self.ticket.begin()
        self.answers: list[tuple[Answer, bool]] = []
        self.began = Event()

    def send(self, answer: Answer, final: bool = True) -> None:
        if self.gate is not None and not final:
            self.began.set()
            assert self.gate.wait(20)
        assert not self.ended, "an answer after the last"
        self.answers.append((answer, final))

    @property
    def ended(self) -> bool:
        return bool(self.answers) and self.answers[-1][1]


class FunctionServices(MetricsInMemory, Services):
    """A server whose models are functions, run on threads of its own."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        super().__init__()
        self.models = models
        self.threads = ThreadPoolExecutor(4)
        self.tickets: list[Ticket] = []
        self.reads: list[Ticket] = []
        self.cancelled: list[Ticket] = []
        self.stopped: list[Ticket] = []
        self.lines: list[tuple[str, str, str, int]] = []
        self.loaded: dict[str, tuple[str, Mapping[str, bytes]]] = {}

    @property
    def requests(self) -> list[InferRequest]:
        return [ticket.request for ticket in self.tickets]

    def infer(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        if ticket.request.model_name in self.models:
            self.threads.submit(self._run, ticket)
        else:
            ticket.respond(NotFound(f"model '{ticket.request.model_name}' is not found"), True)

    def _run(self, ticket: Ticket) -> None:
        answers = list(self.models[ticket.request.model_name](ticket.request))
        for answer in answers[:-1]:
            ticket.respond(answer, False)
        ticket.respond(answers[-1], True)

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket)

    def stop(self, ticket: Ticket) -> None:
        self.stopped.append(ticket)

    def read(self, ticket: Ticket) -> None:
        self.reads.append(ticket)

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        if name == "broken":
            raise NotFound(f"failed to load '{name}', failed to poll from model repository")
        self.loaded[name] = (config, files)

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        if name not in self.loaded:
            raise NotFound(f"model '{name}' is not found")
        del self.loaded[name]

    def is_model_ready(self, name: str, version: str) -> bool:
        if version and not version.isdigit():
            raise NotFound(f"no version '{version}'")
        return name in self.loaded

    def log(self, level: LogLevel, message: str, file: str, line: int) -> None:
        self.lines.append((level, message, file, line))


def double(request: InferRequest) -> Iterator[Answer]:
    x = request.inputs["x"]
    assert isinstance(x, np.ndarray)
    yield InferResponse({"y": x * 2}, {"model": request.model_name})


def count(request: InferRequest) -> Iterator[Answer]:
    """``x`` responses, and an end without a response."""
    x = request.inputs["x"]
    assert isinstance(x, np.ndarray)
    for number in range(int(x[0])):
        yield InferResponse({"y": np.array([number], np.int32)})
    yield None


def refuse(request: InferRequest) -> Iterator[Answer]:
    yield HeadraceError("no room")


@pytest.fixture
def recorded() -> type[Recorded]:
    return Recorded


@pytest.fixture
def services() -> Iterator[FunctionServices]:
    services = FunctionServices({"double": double, "count": count, "refuse": refuse})
    yield services
    services.threads.shutdown()


@pytest.fixture
def runtime(services: FunctionServices) -> Iterator[Runtime]:
    """The runtime of a model ``asker`` that is being executed, for models that do not wait."""
    runtime = Runtime("asker", services=services, phase=ModelPhase.SERVING)
    with runtime.entered():
        yield runtime
