"""Checks of an extension: its answers over the sockets of a real server."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headrace import (
    Extension,
    GrpcMethod,
    HeadraceError,
    HttpRoute,
    Operation,
    ResourceExhausted,
    Server,
    Spec,
    TensorLocation,
    WebSocketRoute,
    dtypes,
)
from headrace_testing.driving import assert_installed, error_of, part_of
from headrace_testing.example import write_model
from headrace_testing.extension_models import Refusing
from headrace_testing.frontend_models import Doubling, WaitingInstance, installed
from headrace_testing.imports import internal_imports
from headrace_testing.metrics import measured
from headrace_testing.serving import blocked_s, on_loop, serve
from headrace_testing.socket_client import SocketClient, no_socket_is_open

_MODEL = """name: "doubles" backend: "doubles" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [2] }
"""
_LIMIT_S = 30
#: A body that no extension accepts.
_MALFORMED = b"\xff\xfe{]\0"
#: The status of a body that is no JSON is 500 over HTTP, as in Triton.
_UNREADABLE = b"failed to parse the request JSON buffer"
#: The close code of a WebSocket whose route failed.
_FAILED = 1011
_INTERNAL = ("the request failed inside the server", "internal error; the server's log")


class ExtensionChecks:
    """A subclass sets ``plugin``, the module of the entry point, and ``extension``, its name, and implements `ask`."""

    plugin: ClassVar[str]
    extension: ClassVar[str]
    #: The maximum time that an answer may block the event loop.
    blocking_s: ClassVar[float] = 0.25

    def options(self) -> Mapping[str, Any]:
        """Return the fields of `ServerOptions` that the extension needs (default: none)."""
        return {}

    def ask(self, served: ServedExtension) -> None:
        """Send requests to what the extension adds, and assert that the answers are right. Called several times.

        The model ``doubles`` of ``served`` returns ``y = 2 * x`` for ``x`` f32[rows, 2].
        """
        raise NotImplementedError

    @property
    def part(self) -> type[Extension]:
        found: type[Extension] = part_of(self.plugin, "extension", self.extension)
        return found

    # ------------------------------------------------------------------ the plugin

    def test_it_adds_something(self) -> None:
        part = self.part
        assert part.adds or part.announces or part.options or part.metrics, "the extension changes nothing"

    def test_its_operations_do_not_shadow_the_servers(self) -> None:
        """An operation with the name of one of the server's would be mistaken for it."""
        for addition in self.part.adds:
            operation = getattr(addition, "operation", Operation.INFER)
            taken = [known for known in Operation if known == operation and known is not operation]
            assert not taken, f"the operation of {addition.kind} '{addition.name}' has the name of {taken[0]!r}"

    def test_no_other_plugin_adds_the_same_route(self, tmp_path: Path) -> None:
        error = error_of(lambda: [*Server(tmp_path).plugins.extensions])
        assert error is None, f"no server can have extension '{self.extension}': {error}"

    def test_it_imports_only_exports_of_headrace(self) -> None:
        assert internal_imports(self.plugin) == []

    # ------------------------------------------------------------------ answers

    def test_it_answers_repeated_requests(self, served: ServedExtension) -> None:
        for _ in range(3):
            self.ask(served)

    def test_it_does_not_block_the_event_loop(self, served: ServedExtension) -> None:
        self.ask(served)  # the first request may import and compile
        blocked = blocked_s(served.server, lambda: self.ask(served), self.blocking_s)
        assert blocked < self.blocking_s, f"an answer blocks the event loop for {blocked:.3f} s"

    def test_two_servers_of_one_process_do_not_mix(self, served: ServedExtension, tmp_path: Path) -> None:
        with self.serving(tmp_path) as other:
            for one in (other, served, other):
                self.ask(one)
            assert served.extension is not other.extension
        self.ask(served)  # after the other one has stopped

    def test_a_malformed_request_is_the_callers_error(self, served: ServedExtension) -> None:
        for method, path in self.paths():
            status, _, body = served.http(method, path, _MALFORMED)
            assert _INTERNAL[0] not in body.decode(errors="replace"), f"{method} {path} fails at a malformed body"
            is_refused = status < 500 or status in (501, 503) or _UNREADABLE in body
            assert is_refused, f"{method} {path} answers a malformed body with {status}"
        for name in self.methods():
            error = error_of(lambda name=name: served.grpc(name, _MALFORMED))  # type: ignore[misc]
            details = str(getattr(error, "details", lambda: "")())
            assert _INTERNAL[1] not in details, f"{name} fails at a malformed message"
        self.ask(served)

    def test_an_unknown_model_is_the_callers_error(self, served: ServedExtension) -> None:
        for method, path in self.paths(model="no_such_model"):
            status, _, body = served.http(method, path, b"{}")
            assert status < 500 or status in (501, 503), f"{method} {path} answers {status}: {body!r}"

    def test_an_interceptor_refuses_every_path_and_method_before_the_body_is_read(self, tmp_path: Path) -> None:
        with self.serving(tmp_path) as served:
            self.ask(served)
            Refusing.refusal = ResourceExhausted("not so fast", retry_after_s=7)
            try:
                for method, path in self.paths():
                    status, headers, _ = served.http(method, path, _MALFORMED)
                    assert (status, headers.get("Retry-After")) == (429, "7"), f"{method} {path} passes an interceptor"
                for name in self.methods():
                    error = error_of(lambda name=name: served.grpc(name, _MALFORMED))  # type: ignore[misc]
                    code = getattr(error, "code", lambda: None)()
                    assert getattr(code, "name", code) == "RESOURCE_EXHAUSTED", f"{name} passes an interceptor: {error}"
            finally:
                Refusing.refusal = None
            self.ask(served)

    # ------------------------------------------------------------------ WebSockets

    def test_a_socket_is_refused_before_it_is_accepted(self, served: ServedExtension) -> None:
        Refusing.refusal = ResourceExhausted("not so fast", retry_after_s=7)
        try:
            for path in self.sockets():
                with served.socket(path) as socket:
                    assert socket.refused_with == 429, f"GET {path} is accepted although an interceptor refuses it"
        finally:
            Refusing.refusal = None

    def test_a_malformed_socket_message_is_the_clients_error(self, served: ServedExtension) -> None:
        for path in self.sockets():
            for message in (_MALFORMED, _MALFORMED.decode("latin-1")):
                with served.socket(path) as socket:
                    code = socket.send(message)
                    assert socket.refused_with not in (426, 500, 501), f"GET {path} answers {socket.refused_with}"
                    assert code != _FAILED, f"GET {path} fails at a malformed message"

    def test_a_socket_ends_when_its_client_disconnects(self, served: ServedExtension) -> None:
        for path in self.sockets():
            with served.socket(path) as socket:
                socket.send("")
                socket.disconnect()
            assert served.has_closed_sockets(), f"GET {path} runs on after its client has disconnected"

    # ------------------------------------------------------------------ tensors, metrics, the end

    def test_an_unknown_location_is_the_callers_error(self, served: ServedExtension) -> None:
        spec = Spec("x", dtypes.FP32, (1, 2))
        for location in served.server.engine.additions(TensorLocation):
            for parameters in ({location.name: "no such place"}, {location.name: -1}):
                for resolve in (location.source, location.target):
                    error = error_of(lambda: resolve(parameters, spec))  # noqa: B023
                    assert error is None or isinstance(error, HeadraceError), (
                        f"tensor location '{location.name}' fails at {parameters}: {error!r}"
                    )

    def test_it_measures_the_declared_metrics(self, served: ServedExtension) -> None:
        extension = served.extension
        before = measured(extension)
        self.ask(served)
        for (metric, value), (_, later) in zip(before, measured(extension), strict=True):
            assert metric.kind != "counter" or later >= value, f"the counter {metric.name} decreases"

    def test_the_server_announces_it(self, served: ServedExtension) -> None:
        assert set(self.part.announces) <= set(served.server.metadata().extensions)

    def test_it_closes_twice_without_a_request(self, tmp_path: Path) -> None:
        with self.serving(tmp_path) as served:
            assert served.extension is not None
        assert error_of(served.extension.close) is None, "a second close fails"

    # ------------------------------------------------------------------ a server

    def paths(self, model: str = "doubles") -> Iterator[tuple[str, str]]:
        """Yield method and path of each route, with and without its optional parts."""
        values = {"name": model, "version": "1"}
        for route in self.part.adds:
            if issubclass(route, HttpRoute):
                method, _, template = route.name.partition(" ")
                pieces = re.split(r"\[(.*?)\]", template)
                for chosen in product((False, True), repeat=len(pieces) // 2):
                    parts = [piece for at, piece in enumerate(pieces) if at % 2 == 0 or chosen[at // 2]]
                    yield method, re.sub(r"{(\w+)}", lambda found: values.get(found[1], "any"), "".join(parts))

    def sockets(self) -> list[str]:
        """Return the paths of the WebSocket routes."""
        names = {route.name.partition("[")[0] for route in self.part.adds if issubclass(route, WebSocketRoute)}
        assert not names or self.options().get("http_server", "native") != "native", (
            "WebSockets need a host that has them: return {'http_server': 'hypercorn'} from options()"
        )
        values = {"name": "doubles", "version": "1"}
        return [re.sub(r"{(\w+)}", lambda found: values.get(found[1], "any"), name[4:]) for name in sorted(names)]

    def methods(self) -> list[str]:
        return [method.name for method in self.part.adds if issubclass(method, GrpcMethod)]

    @pytest.fixture
    def served(self, headrace_repository: Path) -> Iterator[ServedExtension]:
        with self.serving(headrace_repository) as served:
            yield served

    @contextmanager
    def serving(self, repository: Path) -> Iterator[ServedExtension]:
        """Yield a server with the extension and a model that doubles, on free ports."""
        write_model(repository, _MODEL)
        Doubling.instance = WaitingInstance()
        Doubling.instance.may.set()
        options = {"exit_timeout_secs": 5, "model_control_mode": "explicit", **self.options()}
        with installed("headrace_testing.extension_models"), serve(repository, listen=True, **options) as server:
            assert_installed("extension", self.extension, self.plugin, server.plugins.extensions.names())
            on_loop(server, server.load("doubles"))
            enabled = [extension for extension in server.engine.extensions if extension.name == self.extension]
            assert enabled, f"extension '{self.extension}' is not enabled by its options"
            yield ServedExtension(server, enabled[0])


class ServedExtension:
    """A server with the extension, and clients for its ports."""

    def __init__(self, server: Server, extension: Extension) -> None:
        self.server, self.extension = server, extension
        self.http_port, self.grpc_port = server.options.http_port, server.options.grpc_port

    def http(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=_LIMIT_S)
        try:
            connection.request(method, path, body, dict(headers or {}))
            reply = connection.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read()
        finally:
            connection.close()

    @contextmanager
    def socket(self, path: str) -> Iterator[SocketClient]:
        """Yield a client of the WebSocket at ``path``."""
        with SocketClient(f"ws://127.0.0.1:{self.http_port}{path}") as client:
            yield client

    def has_closed_sockets(self) -> bool:
        """Return True as soon as no WebSocket is open, False after 5 s."""
        return on_loop(self.server, no_socket_is_open())

    def grpc(self, method: str, *messages: bytes) -> list[bytes]:
        """Return the responses to ``messages``. Raises `grpc.RpcError`."""
        import grpc

        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            return list(channel.stream_stream(method, bytes, bytes)(iter(messages), timeout=_LIMIT_S))
