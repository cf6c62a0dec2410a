"""An engine, and stand-ins for a model and for a socket: real signatures and options, a model that returns its inputs,
and a connection that is written to byte by byte."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from headrace.builtins import register_interceptors
from headrace.config.model_config_pb2 import DataType, ModelConfig
from headrace.config.options import ServerOptions
from headrace.engine import Engine, ModelView, Phase
from headrace.frontends.extension import Extension
from headrace.messages import dtypes
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Ticket
from headrace.models.interceptors import make_interceptors
from headrace.models.serving_table import ServingTable
from headrace.models.signature import Signature, explain
from headrace.models.states import ModelRecord, VersionRecord
from headrace.models.view import metadata_document
from headrace.off_loop import OffLoopWork
from headrace.plugins import Plugins
from headrace.telemetry.statistics import ModelStatistics, Snapshot
from headrace_http.caller_limits import HttpLimits
from headrace_http.frontend import HttpFrontend
from headrace_http.http_host import HttpHost
from headrace_http.message import Cancel, HttpReply, HttpRequest, Reply
from headrace_http.open_connections import NativeConnections
from headrace_http.protocol import HttpProtocol
from headrace_http.routes import Routes

Dims = Mapping[str, tuple[str, tuple[int, ...]]]


class EchoModel:
    """Returns each input under its own name; with ``holds`` set, stores requests instead."""

    def __init__(self, inputs: Dims, max_batch_size: int = 0, name: str = "echo") -> None:
        self.config = ModelConfig(platform="stub", max_batch_size=max_batch_size)
        for tensor, (datatype, dims) in inputs.items():
            for io in (self.config.input.add(), self.config.output.add()):
                io.name = tensor
                io.data_type = DataType.Value(dtypes.BY_NAME[datatype].config_name)
                io.dims.extend(dims)
        self.name, self.version, self.config.name = name, 1, name
        self.ready, self.has_checks, self.decoupled = True, False, False
        self.why_not_alive = ""
        self.labels: dict[str, list[str]] = {}
        self.signature = Signature(name, self.config)
        self.inputs, self.outputs = self.signature.inputs, self.signature.outputs
        self.requests: list[InferRequest] = []
        self.tickets: list[Ticket] = []  # that are not answered
        self.holds = False

    @property
    def view(self) -> ModelView:
        return ModelView(
            self.name,
            self.version,
            self.config.platform,
            self.config.max_batch_size,
            self.decoupled,
            self.config,
            self.inputs,
            self.outputs,
            self.labels,
            metadata_document(self.config.platform, self.signature),
            SimpleNamespace(in_flight=0, at_once=1, last_ns=0),
            self.signature.check,
            partial(explain, self.signature),
            self.enqueue,
            lambda observer: lambda: None,
            lambda: 1,
        )

    def snapshot(self) -> Snapshot:
        return ModelStatistics().snapshot()

    async def check_ready(self) -> bool:
        return self.ready

    def enqueue(self, ticket: Ticket) -> None:
        self.requests.append(ticket.request)
        if self.holds:
            self.tickets.append(ticket)
        else:
            self.answer(ticket)

    def answer(self, ticket: Ticket) -> None:
        request = ticket.request
        wanted = request.outputs or self.signature.outputs
        outputs: dict[str, Any] = {name: request.inputs[name] for name in self.inputs if name in wanted}
        ticket.respond(InferResponse(outputs, {}, "echo", "1", request.id), True)


class Serving(ServingTable):
    """Serves stand-ins for models."""

    def serve(self, *models: Any) -> None:
        records = {model.name: ModelRecord(model.name, {1: VersionRecord(served=model)}) for model in models}
        for name in records:
            self.update(records, name)
        self.open()


@cache
def own_extensions() -> list[type[Extension]]:
    """The extensions of Headrace itself."""
    return list(Plugins.discover([]).extensions)


class Caller:
    """Sends requests straight to the routes, without a host."""

    def __init__(self, model: EchoModel, **options: Any) -> None:
        self.model = model
        self.table = Serving()
        self.table.serve(model)
        settings = ServerOptions(**options)
        self.engine = Engine(settings, self.table, admission=make_interceptors(register_interceptors(), settings))
        self.engine.extension_parts = own_extensions()
        self.engine.phase = Phase.READY
        self.engine.lifecycle = SimpleNamespace(are_settled=True, why_not_alive="")  # type: ignore[assignment]
        self.routes = Routes(self.engine)

    def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[HttpReply, bytes]:
        """The reply, and its body in one piece."""
        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        folded = {name.lower(): value for name, value in raw}
        request = HttpRequest(method, path, folded, memoryview(body), raw)
        replies: list[HttpReply] = []

        async def dispatch() -> None:
            self.routes.dispatch(request, replies.append)
            while not replies:
                await asyncio.sleep(0)

        # The replies of the repository and those to large requests are not there at once.
        asyncio.run(asyncio.wait_for(dispatch(), 30))
        (reply,) = replies
        return reply, b"".join(reply.parts)

    def infer(
        self, body: object, tensors: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[HttpReply, bytes]:
        """An infer request of ``body`` (bytes, or what becomes JSON) and binary ``tensors``."""
        text = body if isinstance(body, bytes) else orjson.dumps(body)
        length = {"Inference-Header-Content-Length": str(len(text))} if tensors else {}
        return self.send("POST", "/v2/models/echo/infer", text + tensors, {**length, **(headers or {})})


@pytest.fixture(scope="session")
def make_caller() -> Callable[..., Caller]:
    """Makes a `Caller` for an echo model: ``make_caller({"X": ("FP32", (-1,))}, max_batch_size=8)``."""

    def make(inputs: Dims, max_batch_size: int = 0, **options: Any) -> Caller:
        return Caller(EchoModel(inputs, max_batch_size), **options)

    return make


@pytest.fixture(scope="session")
def host() -> type[HttpHost]:
    """The HTTP host of a test. Tests with this fixture also run on the hosts of plugins."""
    return HttpFrontend


class Wire(asyncio.Transport):
    """Records the calls of the protocol to its socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes | memoryview] = []
        self.reads = True
        self.unsent = 0
        self.is_closed = self.has_eof = False
        self.socket: socket.socket | None = None
        #: The protocol whose buffer is always reported as full.
        self.fills: asyncio.BaseProtocol | None = None

    def write(self, data: Any) -> None:
        assert not self.has_eof
        self.written.append(data)
        if self.socket is not None:
            self.socket.sendall(data)
        if self.fills is not None:
            self.fills.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket if name == "socket" else default

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_eof = True

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Peer:
    """One connection with its server side: `send` what a client would, read ``answer``.

    ``beside`` another peer it is a connection of the same server.
    """

    def __init__(self, limits: HttpLimits, beside: Peer | None = None) -> None:
        self.requests: list[HttpRequest] = []
        self.replies: list[Reply] = []
        self.cancelled: list[int] = []
        self.holds = False
        self.unread = b""
        self.turns: list[Callable[[], None]] = []
        self.takes_turns = True
        large = OffLoopWork()
        #: How often memory of large answers was to be returned to the system.
        self.released = 0
        large.release_memory_later = self._release_memory  # type: ignore[method-assign]
        self.connections = NativeConnections(self.dispatch, limits, large)
        self.connections.call_soon = self.turns.append  # type: ignore[method-assign, assignment]
        #: The scheduled calls, with their delay in seconds.
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.connections.call_later = lambda delay_s, callback: self.later.append((delay_s, callback))  # type: ignore[method-assign]
        if beside is not None:
            shared = beside.connections
            self.connections.head_cache = shared.head_cache
            self.connections.received, self.connections.buffer = shared.received, shared.buffer
        self.protocol = HttpProtocol(self.connections)
        self.wire = Wire()
        self.protocol.connection_made(self.wire)

    def _release_memory(self) -> None:
        self.released += 1

    def dispatch(self, request: HttpRequest, reply: Reply) -> Cancel | None:
        number = len(self.requests)
        self.requests.append(request)
        self.replies.append(reply)
        if not self.holds:
            reply(HttpReply(200, (), (request.path.encode(),)))
        return lambda: self.cancelled.append(number)

    def send(self, data: bytes, step: int = 1 << 30) -> None:
        """Deliver ``data`` as a socket does: into the buffer of the protocol, at most ``step`` bytes.

        Bytes that the protocol does not read are delivered with the next ones.
        """
        view = memoryview(self.unread + data)
        while view and self.wire.reads and not self.wire.is_closed:
            buffer = self.protocol.get_buffer(-1)
            size = min(step, len(buffer), len(view))
            assert size > 0
            buffer[:size] = view[:size]
            view = view[size:]
            self.protocol.buffer_updated(size)
            self.take_turns()
        self.unread = bytes(view)

    def take_turns(self) -> None:
        """Run one turn of the event loop."""
        while self.turns and self.takes_turns:
            self.turns.pop(0)()

    @property
    def answer(self) -> bytes:
        return b"".join(self.wire.written)

    @property
    def statuses(self) -> list[int]:
        lines = self.answer.split(b"HTTP/1.1 ")[1:]
        return [int(line[:3]) for line in lines]


@pytest.fixture(scope="session")
def connect() -> Callable[..., Peer]:
    """Makes a `Peer`: ``connect(headers=2)``, ``connect(other)``."""
    return lambda beside=None, **limits: Peer(HttpLimits(**limits), beside)
