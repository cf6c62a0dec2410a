"""Calls that a frontend process sends whole, answered by the tables of the engine's own process. Event loop only."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from headrace.errors import CallerError, Code, HeadraceError, InternalError
from headrace.frontends.failures import tell_fault
from headrace.frontends.processes.schema import FrontendKind, byte_headers, call_frame, read_call, text_headers
from headrace.ipc.framing import Frame, ProtocolError
from headrace.large import Large
from headrace.telemetry.pacing import paced
from headrace_grpc.rpc import Metadata, Rpc, awaited, serialize
from headrace_grpc.rpc_table import rpcs
from headrace_grpc.status import Status
from headrace_http.message import Buffer, HttpReply, HttpRequest
from headrace_http.routes import Routes

if TYPE_CHECKING:
    from headrace.engine import Engine

log = paced(__name__)


class Tables:
    """What answers whole calls: the routes and the RPCs of ``engine``, shared by all processes."""

    def __init__(self, engine: Engine) -> None:
        self.large_work = engine.large_work
        self.dispatch = Routes(engine).dispatch
        self.rpcs: dict[str, Rpc] = {f"{rpc.service}/{rpc.name}": rpc for rpc in rpcs(engine)}


class WholeCalls:
    """Those of one process, until each is answered. ``send`` takes messages."""

    def __init__(self, tables: Tables, send: Callable[[bytes], None]) -> None:
        self._tables, self._send = tables, send
        #: What ends a call whose caller has gone.
        self._open: dict[int, Callable[[], object]] = {}
        self._streams: dict[int, _Chunks] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def hear(self, message: Frame) -> None:
        """Take CALL, TAKEN and LEFT. Raises `ProtocolError` for anything else."""
        head, body = read_call(message)
        try:
            call = int(head["id"])
            if message.kind == FrontendKind.TAKEN:
                if (stream := self._streams.get(call)) is not None:
                    stream.taken()
            elif message.kind == FrontendKind.LEFT:
                self._leave(call)
            elif message.kind != FrontendKind.CALL:
                raise ProtocolError(f"a frontend sends no frame of kind {message.kind}")
            elif "path" in head:
                self._answer_http(call, head, body)
            else:
                self._answer_rpc(call, head, body)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"kind {message.kind}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """The process is gone, and all its callers with it."""
        for call in tuple(self._open):
            self._leave(call)

    def answered(self, call: int, head: Mapping[str, Any], body: tuple[Buffer, ...] = ()) -> None:
        """The last of a call."""
        self._open.pop(call, None)
        self._streams.pop(call, None)
        try:
            message = call_frame(FrontendKind.ANSWER, {"id": call, **head}, body)
        except ValueError as error:
            message = call_frame(FrontendKind.ANSWER, {"id": call, **_failure(InternalError(str(error)))})
        self._send(message)

    def stream(self, call: int, chunks: _Chunks) -> None:
        """``call`` is answered in pieces."""
        self._streams[call] = chunks

    def send_chunk(self, call: int, head: Mapping[str, Any], chunk: Buffer) -> None:
        self._send(call_frame(FrontendKind.CHUNK, {"id": call, **head}, (chunk,)))

    def _leave(self, call: int) -> None:
        self._streams.pop(call, None)
        if (cancel := self._open.pop(call, None)) is not None:
            cancel()

    # ------------------------------------------------------------------ HTTP

    def _answer_http(self, call: int, head: Mapping[str, Any], body: memoryview) -> None:
        headers, raw_headers = dict(byte_headers(head["headers"])), byte_headers(head["raw_headers"])
        request = HttpRequest(str(head["method"]), str(head["path"]), headers, body, raw_headers)
        reply = _WholeReply(self, call, str(head["peer"]))
        self._open[call] = _nothing
        cancel = self._tables.dispatch(request, reply)
        if cancel is not None and call in self._open:
            self._open[call] = cancel

    # ------------------------------------------------------------------ gRPC

    def _answer_rpc(self, call: int, head: Mapping[str, Any], body: memoryview) -> None:
        rpc = self._tables.rpcs[head["rpc"]]
        metadata = tuple((name, _metadatum(value)) for name, value in head["metadata"])
        context = WholeContext(metadata, int(head["deadline_ns"]), str(head["peer"]), head["certificate"])
        task = asyncio.get_running_loop().create_task(self._run(call, rpc, bytes(body), context))
        self._open[call] = task.cancel
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, call: int, rpc: Rpc, body: bytes, context: WholeContext) -> None:
        try:
            answer = await self._answer(rpc, body, context)
        except HeadraceError as error:
            if rpc.unary is not None:
                tell_fault(error, rpc.name)
            self.answered(call, _failure(error))
        except Status as status:
            self.answered(call, {"status": status.code, "message": status.message})
        except DecodeError:
            self.answered(call, _failure(CallerError("Unable to parse request", Code.INTERNAL)))
        except Exception:
            log.exception("a gRPC handler failed")
            self.answered(call, _failure(InternalError("internal error; the server's log has the details")))
        else:
            self.answered(call, {}, (answer,))

    async def _answer(self, rpc: Rpc, body: bytes, context: WholeContext) -> bytes:
        """Raises what parsing and answering raise."""
        try:
            request = rpc.parse(body)
        except Large:
            request = await self._tables.large_work.run(lambda: (rpc.parse_large or rpc.parse)(body))
        handler = rpc.unary if rpc.direct is None else awaited(rpc.direct)
        if handler is None:
            raise ProtocolError(f"{rpc.name} does not travel whole")
        return serialize(await handler(request, context))


@dataclass(frozen=True, slots=True)
class WholeContext:
    """A `headrace_grpc.rpc.Context` of another process."""

    metadata: Metadata
    deadline_ns: int
    peer: str
    certificate: Mapping[str, Any] | None
    draining: bool = False
    streams: int = 1


class _WholeReply:
    """The ``reply`` of an HTTP request that travelled; a second reply is ignored."""

    __slots__ = ("_call", "_calls", "_is_done", "peer")

    def __init__(self, calls: WholeCalls, call: int, peer: str) -> None:
        self._calls, self._call, self.peer = calls, call, peer
        self._is_done = False

    def __call__(self, reply: HttpReply) -> None:
        if not self._is_done:
            self._is_done = True
            head = {"status": reply.status, "headers": text_headers(reply.headers)}
            self._calls.answered(self._call, head, tuple(reply.parts))

    def stream(self, head: HttpReply) -> _Chunks:
        self._is_done = True
        chunks = _Chunks(self._calls, self._call, head)
        self._calls.stream(self._call, chunks)
        return chunks


class _Chunks:
    """An answer in pieces: the next is sent when the caller has taken the last."""

    def __init__(self, calls: WholeCalls, call: int, head: HttpReply) -> None:
        self._calls, self._call = calls, call
        self._head: dict[str, Any] = {"status": head.status, "headers": text_headers(head.headers)}
        self._taken = asyncio.Event()

    async def send(self, chunk: Buffer) -> None:
        self._taken.clear()
        head, self._head = self._head, {}
        self._calls.send_chunk(self._call, head, chunk)
        await self._taken.wait()

    async def end(self) -> None:
        self._calls.answered(self._call, {**self._head, "end": True})

    def break_off(self) -> None:
        self._calls.answered(self._call, {**self._head, "end": False})

    def taken(self) -> None:
        self._taken.set()


def _nothing() -> None:
    """What ends a call that cannot be cancelled."""


def _failure(error: HeadraceError) -> dict[str, Any]:
    return {"code": error.code.value, "message": error.message}


def _metadatum(value: Any) -> str | bytes:
    """A value of metadata: text, or bytes in base64 in a list."""
    return value if isinstance(value, str) else b64decode(value[0])
