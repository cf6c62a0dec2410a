"""The frontend's side of calls that travel whole: it sends them, and passes on what comes back. Event loop only."""

from __future__ import annotations

import asyncio
import itertools
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.errors import CallerError, Code, HeadraceError
from headrace.frontends.processes.schema import FrontendKind, byte_headers, call_frame, read_call, text_headers
from headrace.ipc.framing import Frame
from headrace.telemetry.pacing import paced
from headrace_grpc.rpc import Cancel as LeaveCall
from headrace_grpc.rpc import Context, Direct, Rpc
from headrace_grpc.rpc import Reply as CallReply
from headrace_grpc.status import Status
from headrace_grpc.wire import Buffer, RawRequest
from headrace_http import url_paths as paths
from headrace_http.inference import InferenceHandler
from headrace_http.message import Cancel, HttpReply, HttpRequest, Reply, reply_stream
from headrace_http.routes import Handler, Route, Routes, make_route
from headrace_http.url_paths import PathTarget

if TYPE_CHECKING:
    from headrace.remote_engine import RemoteEngine

log = paced(__name__)

#: Takes the head and the body of what comes back for a call, and whether it is the last.
Heard = Callable[[Mapping[str, Any], memoryview, bool], None]


class Forwarder:
    """The calls of this process that another one answers. ``send`` takes messages."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, Heard] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def hear(self, message: Frame) -> None:
        """Take ANSWER and CHUNK."""
        head, body = read_call(message)
        is_last = message.kind == FrontendKind.ANSWER
        heard = self._open.pop(head["id"], None) if is_last else self._open.get(head["id"])
        if heard is not None:
            heard(head, body, is_last)

    def begin(self, head: Mapping[str, Any], body: Buffer, heard: Heard) -> Callable[[], None]:
        """Send a call; returns what says that its caller has gone. Raises `ValueError` if it is too large."""
        call = next(self._numbers)
        self._send(call_frame(FrontendKind.CALL, {"id": call, **head}, (body,)))
        self._open[call] = heard

        def leave() -> None:
            if self._open.pop(call, None) is not None:
                self._send(call_frame(FrontendKind.LEFT, {"id": call}))

        return leave

    # ------------------------------------------------------------------ HTTP

    def http(self, request: HttpRequest, target: PathTarget, reply: Reply) -> Cancel:
        """A `Handler`."""
        head = {
            "method": request.method,
            "path": request.path,
            "headers": text_headers(tuple(request.headers.items())),
            "raw_headers": text_headers(request.raw_headers),
            "peer": getattr(reply, "peer", ""),
        }
        answer = _HttpAnswer(reply, self._tasks, self._send)
        answer.leave = self.begin(head, request.body, answer)
        return answer.cancel

    # ------------------------------------------------------------------ gRPC

    async def unary(self, name: str, body: bytes, context: Context) -> bytes:
        """The answer to a call of ``name``. Raises the `HeadraceError` or the `Status` that ended it."""
        found: asyncio.Future[bytes | Exception] = asyncio.get_running_loop().create_future()

        def heard(head: Mapping[str, Any], answer: memoryview, is_last: bool) -> None:
            if not found.done():
                found.set_result(_outcome(head, answer))

        leave = self.begin(_call_head(name, context), body, heard)
        try:
            answer = await found
        except asyncio.CancelledError:
            leave()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def direct(self, name: str, body: Buffer, context: Context, reply: CallReply) -> LeaveCall:
        """The same by callback."""

        def heard(head: Mapping[str, Any], answer: memoryview, is_last: bool) -> None:
            outcome = _outcome(head, answer)
            reply(outcome if isinstance(outcome, bytes | HeadraceError) else CallerError(str(outcome), Code.INTERNAL))

        leave = self.begin(_call_head(name, context), body, heard)

        def cancel() -> None:
            leave()
            # Whoever answers calls waits for the last word, even where nobody hears it.
            reply(CallerError("the call was cancelled", Code.CANCELLED))

        return cancel


class _HttpAnswer:
    """Passes an answer on, whole or in pieces; those in a task that ends when the caller leaves."""

    def __init__(self, reply: Reply, tasks: set[asyncio.Task[None]], send: Callable[[bytes], None]) -> None:
        self.leave: Callable[[], None]
        self._reply, self._tasks, self._send = reply, tasks, send
        self._pieces: asyncio.Queue[tuple[Mapping[str, Any], memoryview, bool]] | None = None
        self._task: asyncio.Task[None] | None = None

    def __call__(self, head: Mapping[str, Any], body: memoryview, is_last: bool) -> None:
        if self._pieces is None and "end" not in head and is_last:
            self._reply(_http_reply(head, (body,)))
            return
        if self._pieces is None:
            self._pieces = asyncio.Queue()
            self._task = asyncio.get_running_loop().create_task(self._write(self._pieces, head))
            self._tasks.add(self._task)
            self._task.add_done_callback(self._tasks.discard)
        self._pieces.put_nowait((head, body, is_last))

    def cancel(self) -> None:
        """The caller has gone."""
        self.leave()
        if self._task is not None:
            self._task.cancel()

    async def _write(
        self, pieces: asyncio.Queue[tuple[Mapping[str, Any], memoryview, bool]], first: Mapping[str, Any]
    ) -> None:
        stream = reply_stream(self._reply, _http_reply(first, ()))
        while True:
            head, body, is_last = await pieces.get()
            if not is_last:
                await stream.send(body)
                self._send(call_frame(FrontendKind.TAKEN, {"id": head["id"]}))
            elif head["end"]:
                await stream.end()
                return
            else:
                stream.break_off()
                return


def _http_reply(head: Mapping[str, Any], parts: Sequence[Buffer]) -> HttpReply:
    return HttpReply(head["status"], byte_headers(head["headers"]), parts)


def _call_head(name: str, context: Context) -> dict[str, Any]:
    metadata = [
        (key, value if isinstance(value, str) else [b64encode(value).decode()]) for key, value in context.metadata
    ]
    return {
        "rpc": name,
        "metadata": metadata,
        "deadline_ns": context.deadline_ns,
        "peer": context.peer,
        "certificate": context.certificate,
    }


def _outcome(head: Mapping[str, Any], body: memoryview) -> bytes | HeadraceError | Status:
    if "status" in head:
        return Status(head["status"], head["message"])
    if "code" in head:
        return CallerError(head["message"], Code(head["code"]))  # told where it was made
    return bytes(body)


# ---------------------------------------------------------------------- the tables


class ForwardingRoutes(Routes):
    """Answers infer requests for models that ``engine`` finds, and forwards everything else."""

    def __init__(self, engine: RemoteEngine, forwarder: Forwarder) -> None:
        self._engine, self._forward = engine, forwarder.http
        super().__init__(engine)

    def _build(self, engine: Any) -> list[Route]:
        self._inference = InferenceHandler(engine)
        return [
            make_route(paths.INFER, "inference", POST=self._infer),
            Route(re.compile(".*", re.DOTALL), "", _AnyMethod(self._forward)),
        ]

    def _infer(self, request: HttpRequest, target: PathTarget, reply: Reply) -> Cancel | None:
        if self._engine.finds(target.name, target.version):
            return self._inference(request, target, reply)
        return self._forward(request, target, reply)


class _AnyMethod(dict[str, Handler]):
    """One handler for every method."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    def get(self, method: str, default: Any = None) -> Handler:
        return self._handler


def forwarding_rpcs(table: Sequence[Rpc], engine: RemoteEngine, forwarder: Forwarder) -> list[Rpc]:
    """``table``, whose unary RPCs are forwarded, and ModelInfer for models that ``engine`` does not find."""
    return [_forwarding(rpc, engine, forwarder) for rpc in table]


def _forwarding(rpc: Rpc, engine: RemoteEngine, forwarder: Forwarder) -> Rpc:
    name = f"{rpc.service}/{rpc.name}"
    if rpc.unary is not None:
        # Read where it is answered; its category is checked there, too.
        return replace(rpc, parse=bytes, parse_large=bytes, unary=partial(forwarder.unary, name))
    if rpc.direct is not None:
        return replace(rpc, direct=_perhaps(name, rpc.direct, engine, forwarder))
    return rpc


def _perhaps(name: str, direct: Direct, engine: RemoteEngine, forwarder: Forwarder) -> Direct:
    """``direct`` for models that ``engine`` finds."""
    finds, forward = engine.finds, forwarder.direct

    def infer(request: RawRequest, context: Context, reply: CallReply) -> LeaveCall | None:
        message = request.message
        if finds(message.model_name, message.model_version):
            return direct(request, context, reply)
        return forward(name, request.body, context, reply)

    return infer
