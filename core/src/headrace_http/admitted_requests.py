"""Admission of HTTP requests: runs between a host and the handlers, on a server with interceptors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.engine import Caller
from headrace.errors import CallerError, Cancelled, HeadraceError, plugin_failure
from headrace_http.message import Buffer, ErrorReply, HttpReply, HttpRequest, Reply, ReplyStream, reply_stream
from headrace_http.request_deadline import TIMEOUT, deadline_in

if TYPE_CHECKING:
    from headrace_http.message import Cancel

#: Answers an admitted request. Returns a function that cancels it, or None. Never raises.
Begin: TypeAlias = "Callable[[], Cancel | None]"
#: Answers a refused request.
Refuse: TypeAlias = Callable[[Exception], None]


def caller_of(http: HttpRequest, reply: Reply, transport: str = "http") -> Caller:
    """Return the caller of ``http``. It has a certificate only if the host ends TLS, and no proxy before it does."""
    found = getattr(reply, "caller", None)
    if isinstance(found, Caller):
        return found
    headers = http.headers

    def header(name: str) -> str | None:
        value = headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    def all_headers() -> Iterable[tuple[str, str]]:
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in http.raw_headers]

    try:
        deadline_ns = deadline_in(headers) if TIMEOUT in headers else 0
    except HeadraceError:  # the handler refuses it
        deadline_ns = 0
    peer, certificate = getattr(reply, "peer", ""), getattr(reply, "certificate", None)
    size = len(http.body)
    return Caller(transport, peer, certificate, header, all_headers, deadline_ns=deadline_ns, body_bytes=size)


class AdmittedReply:
    """Takes the answer of a request for ``reply``, and ends the operation of ``caller`` with it."""

    __slots__ = ("_cancel", "_has_left", "_is_answered", "_reply", "_task", "caller")

    def __init__(self, reply: Reply, caller: Caller) -> None:
        self.caller, caller.ends_with_reply = caller, True
        self._reply = reply
        self._is_answered = self._has_left = False
        self._cancel: Cancel | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def peer(self) -> str:
        """The address of the other end; empty if unknown."""
        return self.caller.peer

    @property
    def socket(self) -> Any:
        """The WebSocket that the request opens; None if it opens none."""
        return getattr(self._reply, "socket", None)

    def stream(self, head: HttpReply) -> ReplyStream:
        return _EndingStream(reply_stream(self._reply, head), self.caller)

    def __call__(self, reply: HttpReply) -> None:
        self._is_answered = True
        self._cancel = None
        self.caller.end(_error_in(reply))
        self._reply(reply)
        if self.caller.on_sent is not None:
            self.caller.on_sent()

    def begun(self, cancel: Cancel | None) -> Cancel:
        """Note that the request is being answered, and that ``cancel`` ends that. Return a function to call if the
        caller disconnects first."""
        if not self._is_answered:
            self._cancel = cancel
        return self._leave

    def wait(self, waiting: Coroutine[Any, Any, None], answer: Begin, refuse: Refuse) -> Cancel:
        """Await the admission of the operation, then answer it. Return as `begun` does."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._wait(waiting, answer, refuse))
        self._cancel = partial(loop.call_soon, self._task.cancel)  # not before it has started, or it would run nothing
        return self._leave

    async def _wait(self, waiting: Coroutine[Any, Any, None], answer: Begin, refuse: Refuse) -> None:
        try:
            await waiting
        except HeadraceError as error:
            refuse(error.with_traceback(None))
        except BaseException as error:
            refuse(plugin_failure(error, self._has_left))
        else:
            if not self._has_left:
                self.begun(answer())
        finally:
            self._task = None

    def _leave(self) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            self._has_left = True
            cancel()
            self.caller.end(Cancelled("the caller has disconnected"))


class _EndingStream:
    """A streamed answer. The operation ends with its last chunk."""

    __slots__ = ("_caller", "_stream")

    def __init__(self, stream: ReplyStream, caller: Caller) -> None:
        self._stream, self._caller = stream, caller

    async def send(self, chunk: Buffer) -> None:
        await self._stream.send(chunk)

    async def end(self) -> None:
        await self._stream.end()
        self._caller.end()
        if self._caller.on_sent is not None:
            self._caller.on_sent()

    def break_off(self) -> None:
        self._caller.end(CallerError("the answer was broken off"))
        self._stream.break_off()


def _error_in(reply: HttpReply) -> HeadraceError | None:
    if isinstance(reply, ErrorReply):
        return HeadraceError(reply.failure.message, reply.failure.code)
    return CallerError(f"status {reply.status}") if reply.status >= 400 else None
