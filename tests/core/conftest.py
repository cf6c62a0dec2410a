"""Fixtures of the tests of core: a repository on disk, backends to load from it, and a loop guard."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, ClassVar, Protocol

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from headrace.backends.base import Backend, Instance, Model, Tensors
from headrace.config.options import ServerOptions
from headrace.errors import HeadraceError, LoadError
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Respond, Ticket
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace.server import Server
from headrace.storage.repositories import Repositories
from headrace.telemetry import log_limits
from headrace_cli.inspection.inspector import Inspector


def inspect(repository: Path, *, has_engines: bool = True, **options: Any) -> list[str]:
    """Return the problems of all models of ``repository``, as `Inspector` finds them, each with its line."""
    with Inspector(ServerOptions(model_repository=(str(repository),), **options)) as inspector:
        lines = []
        for name in inspector.models():
            try:
                with inspector.open(name) as model:
                    problems = model.check(has_engines=has_engines).problems
                    lines += [f"{(model.place(one.field) or (0,))[0]}: {one.message}" for one in problems]
            except HeadraceError as error:
                lines.append(error.message)
        return lines


@pytest.fixture(autouse=True)
def loop_guard() -> Iterator[BlockBuster]:
    """Fails a test in which the event loop is blocked by a sleep, a lock, a file or a socket."""
    with blockbuster_ctx("headrace") as guard:
        for function in guard.functions.values():
            function.can_block_in("headrace/plugins.py", {"discover"})  # before the server has begun
        # The collector may run finalizers of another test's executors anywhere, and those take locks.
        gc.disable()
        yield guard
        gc.enable()


def make_ticket(
    model: str = "m",
    inputs: Mapping[str, Any] = MappingProxyType({}),
    respond: Respond = lambda answer, final: None,
    outputs: Sequence[str] = (),
    id: str = "",
    *,
    rows: int = 1,
    arrival_ns: int = 0,
    queued_ns: int = 0,
    respond_at_once: Callable[[InferResponse], None] | None = None,
    **fields: Any,
) -> Ticket:
    """Return a ticket and its request in the state after submission."""
    ticket = Ticket(InferRequest(model, inputs, outputs, id, **fields), respond)
    ticket.rows, ticket.queued_ns, ticket.respond_at_once = rows, queued_ns, respond_at_once
    ticket.arrival_ns = arrival_ns or ticket.arrival_ns
    return ticket


def local_repositories(*roots: Path) -> Repositories:
    """The models of directories."""
    return Repositories(ServerOptions(model_repository=tuple(map(str, roots))), Plugins.discover(()).storages)


@pytest.fixture(autouse=True)
def unhurried_log() -> None:
    """No test is short of lines because the one before it has logged the same ones."""
    log_limits.flush()


class Interrupted:
    """Runs a call repeatedly, each time interrupted by another call at another line, as by a finalizer: before its
    first line, its second, and so on, including the lines of all functions that it calls."""

    def __call__(self, call: Callable[[], object], by: Callable[[], object]) -> int:
        """Return the number of lines of ``call``. Raises the error of either, and TimeoutError if they hang."""
        return next(line for line in count() if not self._run(call, by, line))

    def _run(self, call: Callable[[], object], by: Callable[[], object], line: int) -> bool:
        """Return True if ``call`` had as many lines."""
        done: Future[bool] = Future()
        threading.Thread(target=self._trace, args=(call, by, line, done), daemon=True).start()
        return done.result(10)

    @staticmethod
    def _trace(call: Callable[[], object], by: Callable[[], object], line: int, done: Future[bool]) -> None:
        left = line

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if event == "line":
                left -= 1
                if left == -1:
                    by()
            return trace

        try:
            sys.settrace(trace)
            call()
            sys.settrace(None)
            done.set_result(left < 0)
        except BaseException as error:
            sys.settrace(None)
            done.set_exception(error)


@pytest.fixture
def interrupted() -> Interrupted:
    return Interrupted()


class WriteModel(Protocol):
    def __call__(self, name: str, text: str = ..., versions: tuple[int, ...] = ...) -> Path: ...


IDENTITY = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    return path


@pytest.fixture
def write_model(repository: Path) -> WriteModel:
    """Writes a model into the repository; by default an identity model."""

    def write(name: str, text: str = IDENTITY, versions: tuple[int, ...] = (1,)) -> Path:
        for version in versions:
            (repository / name / str(version)).mkdir(parents=True, exist_ok=True)
        (repository / name / "config.pbtxt").write_text(text)
        return repository / name

    return write


class Gate(Instance):
    """An identity that executes only while its gate is open, and counts its rows."""

    def __init__(self, gate: threading.Event, closed: list[str], name: str) -> None:
        self.gate, self.closed, self.name = gate, closed, name
        self.ready = True

    def execute(self, inputs: Tensors) -> Tensors:
        self.gate.wait(20)
        return {"y": inputs["x"]}

    def is_ready(self) -> bool:
        return self.ready

    def close(self) -> None:
        self.closed.append(self.name)


class Gated(Backend):
    """Loads `Gate` instances; what happened stands in class attributes that the fixture resets."""

    name: ClassVar[str] = "gated"
    gate: ClassVar[threading.Event]
    failing: ClassVar[set[int]]
    refused: ClassVar[list[int]]
    loaded: ClassVar[list[Gate]]
    closed: ClassVar[list[str]]

    def load(self, model: Model) -> Gate:
        if model.version in self.failing:
            self.refused.append(model.version)
            raise LoadError(f"version {model.version} is broken")
        instance = Gate(self.gate, self.closed, f"{model.instance_name}/{model.version}")
        self.loaded.append(instance)
        return instance


GATED = IDENTITY.replace('"identity"', '"gated"')


@pytest.fixture
def gated() -> type[Gated]:
    Gated.gate, Gated.failing, Gated.refused = threading.Event(), set(), []
    Gated.loaded, Gated.closed = [], []
    Gated.gate.set()
    return Gated


@pytest.fixture
def make_server(repository: Path, gated: type[Gated]) -> Callable[..., Server]:
    """A server on the repository that also has the `Gated` backend; not started."""

    def make(**options: Any) -> Server:
        server = Server(repository, **options)
        server.plugins.backends.add(gated, PluginInfo("gated", "tests", "0"))
        return server

    return make
