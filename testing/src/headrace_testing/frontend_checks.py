"""Checks of a frontend: its answers, its start and its stop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace import Frontend, Server, Unavailable
from headrace_testing.driving import error_of, part_of
from headrace_testing.example import write_model
from headrace_testing.free_ports import free_port
from headrace_testing.frontend_models import (
    Doubling,
    WaitingDoubling,
    WaitingInstance,
    Watching,
    installed,
)
from headrace_testing.imports import internal_imports
from headrace_testing.serving import blocked_s, on_loop

_IO = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [2] }
"""
_X = np.array([[1, 2]], np.float32)


class FrontendChecks:
    """A subclass sets ``plugin``, the module of the entry point, and ``frontend``, its name.

    It implements `options` (how it listens) and `infer` (how to send a request).
    """

    plugin: ClassVar[str]
    frontend: ClassVar[str]
    #: The maximum time that a request may block the event loop.
    blocking_s: ClassVar[float] = 0.25
    #: The maximum time of a stop without requests in flight.
    stops_in_s: ClassVar[float] = 10.0
    #: The timeout of a check that hangs.
    hanging_s: ClassVar[float] = 90.0

    def options(self, port: int) -> Mapping[str, Any]:
        """Return the fields of `ServerOptions` with which the frontend listens on ``port`` of 127.0.0.1, without
        TLS."""
        raise NotImplementedError

    def infer(self, connection: socket.socket, model: str, x: Any) -> Any:
        """Return the output ``y`` of ``model`` for ``x`` f32[rows, 2], requested over ``connection``. Any thread.

        Raises RuntimeError with the text of an error response.
        """
        raise NotImplementedError

    @property
    def frontend_class(self) -> type[Frontend]:
        found: type[Frontend] = part_of(self.plugin, "frontend", self.frontend)
        return found

    # ------------------------------------------------------------------ answers

    def test_consecutive_requests_get_their_own_answers(self, served: Served) -> None:
        with served.connect() as connection:
            for number in range(3):
                np.testing.assert_array_equal(self.infer(connection, "doubles", _X + number), 2 * (_X + number))

    def test_an_unknown_model_is_named_and_the_next_request_succeeds(self, served: Served) -> None:
        with served.connect() as connection, pytest.raises(RuntimeError, match="no_such_model"):
            self.infer(connection, "no_such_model", _X)
        with served.connect() as connection:
            assert self.infer(connection, "doubles", _X).shape == _X.shape

    def test_a_wrong_shape_is_refused(self, served: Served) -> None:
        with served.connect() as connection, pytest.raises(RuntimeError, match="x"):
            self.infer(connection, "doubles", np.ones((1, 3), np.float32))

    def test_every_request_passes_the_interceptors(self, served: Served) -> None:
        with served.connect() as connection:
            self.infer(connection, "doubles", _X)
        assert [caller.peer for caller in Watching.seen] == ["127.0.0.1"]

    def test_an_idle_connection_does_not_block_others(self, served: Served) -> None:
        with served.connect(), served.connect() as connection:
            assert self.infer(connection, "doubles", _X).shape == _X.shape

    def test_it_does_not_block_the_event_loop(self, served: Served) -> None:
        with served.connect() as connection:
            blocked = blocked_s(served.server, lambda: self.infer(connection, "doubles", _X), self.blocking_s)
        assert blocked < self.blocking_s, f"a request blocks the event loop for {blocked:.3f} s"

    # ------------------------------------------------------------------ start and stop

    def test_a_port_in_use_is_named(self, served: Served) -> None:
        with pytest.raises(Unavailable, match=str(served.port)):
            on_loop(served.server, self.frontend_class(served.server.engine).start())

    def test_stop_answers_requests_in_flight(self, served: Served) -> None:
        with served.connect() as connection:
            answer = served.ask(connection, "waits")
            assert WaitingDoubling.instance.has_begun.wait(self.hanging_s), "the request has not reached the model"
            stopping = asyncio.run_coroutine_threadsafe(served.frontend.stop(), served.server.loop)
            with pytest.raises(LateError):
                stopping.result(0.2)  # it waits for the answer
            WaitingDoubling.instance.may.set()
            np.testing.assert_array_equal(answer.result(self.hanging_s), 2 * _X)
            stopping.result(self.hanging_s)

    def test_stop_closes_idle_connections_and_frees_the_port(self, served: Served) -> None:
        with served.connect() as connection:
            self.infer(connection, "doubles", _X)
            asyncio.run_coroutine_threadsafe(served.frontend.stop(), served.server.loop).result(self.stops_in_s)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", served.port))
        on_loop(served.server, served.frontend.start())
        with served.connect() as connection:
            assert self.infer(connection, "doubles", _X).shape == _X.shape

    # ------------------------------------------------------------------ the plugin

    def test_no_other_plugin_has_a_frontend_of_that_name(self, tmp_path: Path) -> None:
        error = error_of(lambda: Server(tmp_path).plugins.frontends.get(self.frontend))
        assert error is None, f"no server can have frontend '{self.frontend}': {error}"

    def test_it_imports_only_exports_of_headrace(self) -> None:
        assert internal_imports(self.plugin) == []

    # ------------------------------------------------------------------ a server

    @pytest.fixture
    def served(self, headrace_repository: Path) -> Iterator[Served]:
        with self.serving(headrace_repository) as served:
            yield served

    @contextmanager
    def serving(self, repository: Path) -> Iterator[Served]:
        """Yield a server with the frontend and two models that double; one of them waits for the test."""
        for name in ("doubles", "waits"):
            write_model(repository, f'name: "{name}" backend: "{name}"' + _IO)
        Doubling.instance = WaitingInstance()
        Doubling.instance.may.set()
        WaitingDoubling.instance, Watching.seen = WaitingInstance(), []
        port = free_port()
        protocols = {f"allow_{name}": name == self.frontend for name in ("http", "grpc", "metrics")}
        options = {**protocols, "exit_timeout_secs": 5, "model_control_mode": "explicit", **self.options(port)}
        with (
            installed("headrace_testing.frontend_models"),
            Server(repository, **options) as server,
            _listeners(server.loop),
        ):
            for name in ("doubles", "waits"):
                on_loop(server, server.load(name))
            frontend = self.frontend_class(server.engine)
            assert frontend.enabled, f"frontend '{self.frontend}' is not enabled by its options"
            on_loop(server, frontend.start())
            try:
                yield Served(self, server, frontend, port)
            finally:
                WaitingDoubling.instance.may.set()
                on_loop(server, asyncio.wait_for(frontend.stop(), self.hanging_s))


@contextmanager
def _listeners(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """At the end, close the servers that still listen on ``loop``: uvloop would wait for them forever."""
    create, listeners = loop.create_server, list[asyncio.Server]()

    async def create_server(*arguments: Any, **named: Any) -> asyncio.Server:
        listeners.append(await create(*arguments, **named))
        return listeners[-1]

    loop.create_server = create_server  # type: ignore[method-assign]
    try:
        yield
    finally:
        for listener in listeners:
            loop.call_soon_threadsafe(listener.close)


class Served:
    """The frontend on ``port``, and its server."""

    def __init__(self, checks: FrontendChecks, server: Server, frontend: Frontend, port: int) -> None:
        self.server, self.frontend, self.port = server, frontend, port
        self._checks = checks

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), self._checks.hanging_s)

    def ask(self, connection: socket.socket, model: str) -> Future[Any]:
        """Send a request to ``model`` on a thread. Return its future answer."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(self._checks.infer(connection, model, _X))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return answer
