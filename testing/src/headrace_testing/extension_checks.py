"""An extension from outside: what its callers get, over the sockets of a real server."""

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
from headrace_testing.driving import error_of, part_of
from headrace_testing.example import write_model
from headrace_testing.extension_models import Refusing, installed_plugin
from headrace_testing.frontend_models import Doubling, WaitingInstance
from headrace_testing.imports import internal_imports
from headrace_testing.metrics import measured
from headrace_testing.serving import on_loop, serve
from headrace_testing.socket_client import SocketClient, no_socket_is_served

_MODEL = """name: "doubles" backend: "doubles" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [2] }
"""
_LIMIT_S = 30
#: No request that any extension takes.
_NONSENSE = b"\xff\xfe{]\0"
#: The status of a body that is no JSON is 500 over HTTP, as in Triton.
_UNREADABLE = b"failed to parse the request JSON buffer"
#: The code of a WebSocket whose route failed.
_FAILED = 1011
_INTERNAL = ("the request failed inside the server", "internal error; the server's log")


class ExtensionChecks:
    """``plugin`` is the module of the entry point, and ``extension`` the name. A subclass says how to `ask` it."""

    plugin: ClassVar[str]
    extension: ClassVar[str]

    def options(self) -> Mapping[str, Any]:
        """Return the fields of `ServerOptions` that the extension needs; by default none."""
        return {}

    def ask(self, served: ServedExtension) -> None:
        """Ask ``served`` for what the extension adds, and assert that the answers are right. Called several times.

        Its model ``doubles`` answers ``x`` f32[rows, 2] with ``y``, twice as much.
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

    def test_its_operations_are_its_own_or_the_servers(self) -> None:
        """An operation of an extension that is called like one of the server's would be taken for that."""
        for addition in self.part.adds:
            operation = getattr(addition, "operation", Operation.INFER)
            taken = [known for known in Operation if known == operation and known is not operation]
            assert not taken, f"the operation of {addition.kind} '{addition.name}' is called like {taken[0]!r}"

    def test_no_other_plugin_adds_the_same(self, tmp_path: Path) -> None:
        error = error_of(lambda: [*Server(tmp_path).plugins.extensions])
        assert error is None, f"no server can have extension '{self.extension}': {error}"

    def test_it_imports_of_headrace_what_is_exported(self) -> None:
        assert internal_imports(self.plugin) == []

    # ------------------------------------------------------------------ answers

    def test_it_answers_again_and_again(self, served: ServedExtension) -> None:
        for _ in range(3):
            self.ask(served)

    def test_two_servers_of_one_process_do_not_mix(self, served: ServedExtension, tmp_path: Path) -> None:
        with self.serving(tmp_path) as other:
            for one in (other, served, other):
                self.ask(one)
            assert served.extension is not other.extension
        self.ask(served)  # while the other one has gone

    def test_what_is_no_request_is_the_callers_fault(self, served: ServedExtension) -> None:
        for method, path in self.paths():
            status, _, body = served.http(method, path, _NONSENSE)
            assert _INTERNAL[0] not in body.decode(errors="replace"), f"{method} {path} fails at nonsense"
            is_judged = status < 500 or status in (501, 503) or _UNREADABLE in body
            assert is_judged, f"{method} {path} answers nonsense with {status}"
        for name in self.methods():
            error = error_of(lambda name=name: served.grpc(name, _NONSENSE))  # type: ignore[misc]
            details = str(getattr(error, "details", lambda: "")())
            assert _INTERNAL[1] not in details, f"{name} fails at a message that is nonsense"
        self.ask(served)

    def test_a_model_that_is_not_there_is_the_callers_fault(self, served: ServedExtension) -> None:
        for method, path in self.paths(model="no_such_model"):
            status, _, body = served.http(method, path, b"{}")
            assert status < 500 or status in (501, 503), f"{method} {path} answers {status}: {body!r}"

    def test_an_interceptor_refuses_every_path_and_method_before_the_body_is_read(self, tmp_path: Path) -> None:
        with self.serving(tmp_path) as served:
            self.ask(served)
            Refusing.refusal = ResourceExhausted("not so fast", retry_after_s=7)
            try:
                for method, path in self.paths():
                    status, headers, _ = served.http(method, path, _NONSENSE)
                    assert (status, headers.get("Retry-After")) == (429, "7"), f"{method} {path} passes an interceptor"
                for name in self.methods():
                    error = error_of(lambda name=name: served.grpc(name, _NONSENSE))  # type: ignore[misc]
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

    def test_nonsense_in_a_socket_is_the_clients_fault(self, served: ServedExtension) -> None:
        for path in self.sockets():
            for message in (_NONSENSE, _NONSENSE.decode("latin-1")):
                with served.socket(path) as socket:
                    code = socket.tell(message)
                    assert socket.refused_with not in (426, 500, 501), f"GET {path} answers {socket.refused_with}"
                    assert code != _FAILED, f"GET {path} fails at a message that is nonsense"

    def test_a_socket_ends_when_its_client_disconnects(self, served: ServedExtension) -> None:
        for path in self.sockets():
            with served.socket(path) as socket:
                socket.tell("")
                socket.disconnect()
            assert served.has_ended_sockets(), f"GET {path} goes on after its client has disconnected"

    # ------------------------------------------------------------------ tensors, metrics, the end

    def test_a_location_that_is_not_there_is_the_callers_fault(self, served: ServedExtension) -> None:
        spec = Spec("x", dtypes.FP32, (1, 2))
        for location in served.server.engine.additions(TensorLocation):
            for parameters in ({location.name: "no such place"}, {location.name: -1}):
                for resolve in (location.source, location.target):
                    error = error_of(lambda: resolve(parameters, spec))  # noqa: B023
                    assert error is None or isinstance(error, HeadraceError), (
                        f"tensor location '{location.name}' fails at {parameters}: {error!r}"
                    )

    def test_its_metrics_are_those_that_it_declares(self, served: ServedExtension) -> None:
        extension = served.extension
        before = measured(extension)
        self.ask(served)
        for (metric, value), (_, later) in zip(before, measured(extension), strict=True):
            assert metric.kind != "counter" or later >= value, f"the counter {metric.name} falls"

    def test_the_server_announces_it(self, served: ServedExtension) -> None:
        assert set(self.part.announces) <= set(served.server.metadata().extensions)

    def test_it_closes_without_having_been_asked(self, tmp_path: Path) -> None:
        with self.serving(tmp_path) as served:
            assert served.extension is not None
        assert error_of(served.extension.close) is None, "close fails where it was called before"

    # ------------------------------------------------------------------ a server

    def paths(self, model: str = "doubles") -> Iterator[tuple[str, str]]:
        """Yield method and path of each route, with and without what may be missing."""
        values = {"name": model, "version": "1"}
        for route in self.part.adds:
            if issubclass(route, HttpRoute):
                method, _, template = route.name.partition(" ")
                pieces = re.split(r"\[(.*?)\]", template)
                for chosen in product((False, True), repeat=len(pieces) // 2):
                    kept = [piece for at, piece in enumerate(pieces) if at % 2 == 0 or chosen[at // 2]]
                    yield method, re.sub(r"{(\w+)}", lambda found: values.get(found[1], "any"), "".join(kept))

    def sockets(self) -> list[str]:
        """Return the paths of the WebSocket routes."""
        names = {route.name.partition("[")[0] for route in self.part.adds if issubclass(route, WebSocketRoute)}
        assert not names or self.options().get("http_server", "native") != "native", (
            "a WebSocket is tested on a host that has them: options() returns {'http_server': 'hypercorn'}"
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
        """A server with the extension and a model that doubles, on free ports."""
        write_model(repository, _MODEL)
        Doubling.instance = WaitingInstance()
        Doubling.instance.may.set()
        options = {"exit_timeout_secs": 5, "model_control_mode": "explicit", **self.options()}
        with installed_plugin(), serve(repository, listen=True, **options) as server:
            names = server.plugins.extensions.names()
            assert self.extension in names, (
                f"no installed distribution brings extension '{self.extension}', only {', '.join(names)}; add an entry "
                f'point of the group headrace: {self.extension} = "{self.plugin}"'
            )
            on_loop(server, server.load("doubles"))
            made = [extension for extension in server.engine.extensions if extension.name == self.extension]
            assert made, f"extension '{self.extension}' is not enabled by its options"
            yield ServedExtension(server, made[0])


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

    def has_ended_sockets(self) -> bool:
        """Return True as soon as no WebSocket is served; False if one is for too long."""
        return on_loop(self.server, no_socket_is_served())

    def grpc(self, method: str, *messages: bytes) -> list[bytes]:
        """Return the responses to ``messages``. Raises `grpc.RpcError`."""
        import grpc

        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            return list(channel.stream_stream(method, bytes, bytes)(iter(messages), timeout=_LIMIT_S))
