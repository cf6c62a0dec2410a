"""gRPC calls as HTTP/2 streams: messages in, a handler, messages and a status out.

::

    DirectCall   one message in, one out, by callback: the hot path
    UnaryCall    the same, with a task for its handler
    StreamCall   any number of each, with a task for its handler
    RefusedCall  ended by its headers

A call `is_ended` once its status is decided, or once nobody is left to hear it. What its handler
says afterwards is not heard. Everything runs on the event loop, except that large messages are
unpacked on a thread.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Coroutine
from struct import Struct
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from penstock.errors import PenstockError
from penstock.frontends.grpc import blocks
from penstock.frontends.grpc.compression import IDENTITY, inflate
from penstock.frontends.grpc.context import Cancel, Metadata
from penstock.frontends.grpc.heads import Head
from penstock.frontends.grpc.inbox import PREFIX_BYTES, Buffer, Inbox
from penstock.frontends.grpc.rpcs import serialize
from penstock.frontends.grpc.status import CANCELLED, DEADLINE_EXCEEDED, INTERNAL, OK, STATUS, UNIMPLEMENTED, Status
from penstock.frontends.grpc.wire import MESSAGE_BYTES
from penstock.frontends.http2 import frames
from penstock.frontends.http2.connection import Connection
from penstock.frontends.http2.stream import Stream

if TYPE_CHECKING:
    from penstock.frontends.grpc.native_host import Calls

log = logging.getLogger(__name__)

_PREFIX = Struct(">BL")
_BEGIN = blocks.begin()
#: Packed messages up to here are unpacked on the event loop: a thread would cost more.
_INLINE_BYTES = 4096


class Call(Stream):
    """What all calls have in common. Handlers see it as their ``Context``."""

    __slots__ = ("_calls", "_head", "_inbox", "_timer", "is_ended")

    def __init__(self, connection: Connection, id: int, calls: Calls, head: Head) -> None:
        Stream.__init__(self, connection, id)
        self._calls = calls
        self._head = head
        self._inbox: Inbox | None = None
        self._timer = calls.loop.call_later(head.timeout, self._expire) if head.timeout else None
        self.is_ended = False

    # ------------------------------------------------------------------ handlers call

    @property
    def metadata(self) -> Metadata:
        return self._head.metadata

    @property
    def draining(self) -> bool:
        return self._calls.draining

    # ------------------------------------------------------------------ the stream calls

    def data_received(self, data: Buffer, ended: bool) -> None:
        if self._inbox is None:
            self._inbox = Inbox()
        try:
            self._inbox.append(data)
            self._gathered(self._inbox, ended)
        except Status as status:
            self.fail(status)

    def tail(self, size_bytes: int) -> memoryview | None:
        if self._inbox is None or not self._inbox.is_coming:
            return None
        try:
            return self._inbox.tail(size_bytes)
        except Status as status:
            self.fail(status)
            return None

    def tail_received(self, size_bytes: int, ended: bool) -> None:
        assert self._inbox is not None
        self._inbox.advance(size_bytes)
        try:
            self._gathered(self._inbox, ended)
        except Status as status:
            self.fail(status)

    def lost(self) -> None:
        if not self.is_ended:
            self._end()
            self._cancel_handler()

    # ------------------------------------------------------------------ ending

    def fail(self, reason: Exception) -> None:
        """End the call with the status of ``reason``; what is not ours is logged and not shown."""
        if isinstance(reason, PenstockError):
            self.finish(STATUS[reason.code], reason.message)
        elif isinstance(reason, Status):
            self.finish(reason.code, reason.message)
        elif isinstance(reason, DecodeError):
            self.finish(INTERNAL, "Unable to parse request")
        else:
            log.error("a gRPC handler failed", exc_info=reason)
            self.finish(INTERNAL, "internal error; the server's log has the details")

    def finish(self, code: int, message: str = "") -> None:
        """End the call, if it has not ended."""
        if not self.is_ended:
            self._end()
            self._send_status(code, message)

    def _end(self) -> None:
        self.is_ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _send_status(self, code: int, message: str) -> None:
        self.end(blocks.refusal(code, message))

    def _expire(self) -> None:
        self.finish(DEADLINE_EXCEEDED, "Deadline Exceeded")
        self._cancel_handler()

    def _cancel_handler(self) -> None:
        """Tell the handler that nobody waits for it."""

    @abstractmethod
    def _gathered(self, inbox: Inbox, ended: bool) -> None:
        """Something has come, and perhaps all. Raises `Status`."""

    async def _unpacked(self, flag: int, body: Buffer) -> Buffer:
        encoding = self._head.encoding
        if not flag:
            return body
        if encoding == IDENTITY:
            raise Status(INTERNAL, "Compression bit set but no encoding configured")
        if len(body) <= _INLINE_BYTES:
            return inflate(body, encoding, MESSAGE_BYTES)
        return await asyncio.to_thread(inflate, body, encoding, MESSAGE_BYTES)


class RefusedCall(Call):
    """Ended by its headers."""

    __slots__ = ()

    def __init__(self, connection: Connection, id: int, calls: Calls, head: Head) -> None:
        Call.__init__(self, connection, id, calls, head)
        self._end()
        self.end(head.refusal)

    def _gathered(self, inbox: Inbox, ended: bool) -> None:
        """Nobody listens."""


class SingleCall(Call):
    """One message in, one out."""

    __slots__ = ("_task",)

    def __init__(self, connection: Connection, id: int, calls: Calls, head: Head) -> None:
        Call.__init__(self, connection, id, calls, head)
        self._task: asyncio.Task[None] | None = None

    def data_received(self, data: Buffer, ended: bool) -> None:
        size = len(data) - PREFIX_BYTES
        if ended and self._inbox is None and size >= 0 and _PREFIX.unpack_from(data) == (0, size):
            self._start(bytes(data[PREFIX_BYTES:]))  # nearly always
        else:
            Call.data_received(self, data, ended)

    def _gathered(self, inbox: Inbox, ended: bool) -> None:
        complete = inbox.complete
        if len(complete) > 1 or (complete and not inbox.is_between):
            raise Status(UNIMPLEMENTED, "more than one request message")
        if not ended:
            wanted = inbox.missing_bytes - self.receive_window
            if wanted > 0:
                self.credit(wanted)
            return
        if not inbox.is_between:
            raise Status(INTERNAL, "the request message is incomplete")
        if not complete:
            raise Status(UNIMPLEMENTED, "no request message")
        flag, body = complete.popleft()
        if flag:
            self._begin_task(self._unpack(flag, body))
        else:
            self._start(body)

    @abstractmethod
    def _start(self, body: Buffer) -> None:
        """Let the handler begin."""

    def succeed(self, body: bytes) -> None:
        """End the call with an answer."""
        if self.is_ended:
            return
        self._end()
        encoding = self._calls.encoding(self._head)
        if encoding:
            body = self._calls.compressor.deflate(body, encoding)
            self.respond(blocks.begin(encoding), _PREFIX.pack(1, len(body)), body, blocks.SUCCESS)
        else:
            self.respond(_BEGIN, _PREFIX.pack(0, len(body)), body, blocks.SUCCESS)

    async def _unpack(self, flag: int, body: Buffer) -> None:
        try:
            self._start(await self._unpacked(flag, body))
        except Status as status:
            self.fail(status)
        finally:
            self.done()

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        self.is_busy = True
        self._task = self._calls.loop.create_task(work)

    def _cancel_handler(self) -> None:
        if self._task is not None:
            self._task.cancel()


class DirectCall(SingleCall):
    """By callback."""

    __slots__ = ("_cancel",)

    def __init__(self, connection: Connection, id: int, calls: Calls, head: Head) -> None:
        SingleCall.__init__(self, connection, id, calls, head)
        self._cancel: Cancel | None = None

    def _start(self, body: Buffer) -> None:
        rpc = self._head.rpc
        assert rpc is not None
        assert rpc.direct is not None
        self.is_busy = True
        try:
            cancel = rpc.direct(rpc.parse(body), self, self._reply)
        except Exception as error:
            self.fail(error)
            self.done()
        else:
            if self.is_busy:
                self._cancel = cancel

    def _reply(self, answer: bytes | PenstockError) -> None:
        self._cancel = None
        if isinstance(answer, bytes):
            self.succeed(answer)
        else:
            self.fail(answer)
        self.done()

    def _cancel_handler(self) -> None:
        SingleCall._cancel_handler(self)
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()


class UnaryCall(SingleCall):
    """By a task."""

    __slots__ = ()

    def _start(self, body: Buffer) -> None:
        self._begin_task(self._run(body))

    async def _run(self, body: Buffer) -> None:
        rpc = self._head.rpc
        assert rpc is not None
        assert rpc.unary is not None
        try:
            self.succeed(serialize(await rpc.unary(rpc.parse(body), self)))
        except asyncio.CancelledError:
            self.finish(CANCELLED, "the call was cancelled")
        except Exception as error:
            self.fail(error)
        finally:
            self.done()


class StreamCall(Call):
    """Any number of messages in both directions."""

    __slots__ = ("_arrival", "_drain", "_encoding", "_has_begun", "_task", "_unread_bytes")

    is_patient = True

    def __init__(self, connection: Connection, id: int, calls: Calls, head: Head) -> None:
        Call.__init__(self, connection, id, calls, head)
        self._inbox = Inbox()
        self._arrival: asyncio.Future[None] | None = None
        self._drain: asyncio.Future[None] | None = None
        self._encoding = calls.encoding(head)
        self._has_begun = False
        self._unread_bytes = 0
        self.is_busy = True
        self._task = calls.loop.create_task(self._run())

    def drained(self) -> None:
        _wake(self._drain)

    async def _run(self) -> None:
        rpc = self._head.rpc
        assert rpc is not None
        assert rpc.stream is not None
        try:
            await rpc.stream(self._requests(), self._send, self)
        except asyncio.CancelledError:
            self.finish(CANCELLED, "the call was cancelled")
        except Exception as error:
            self.fail(error)
        else:
            self.finish(OK)
        finally:
            self.done()

    async def _requests(self) -> AsyncIterator[Any]:
        rpc, inbox = self._head.rpc, self._inbox
        assert rpc is not None
        assert inbox is not None
        while True:
            while inbox.complete:
                flag, body = inbox.complete.popleft()
                self._unread_bytes -= len(body) + PREFIX_BYTES
                self._invite(inbox)
                yield rpc.parse(await self._unpacked(flag, body))
            if self.is_remote_closed:
                break
            self._arrival = self._calls.loop.create_future()
            await self._arrival
        if not inbox.is_between:
            raise Status(INTERNAL, "the last request message is incomplete")

    async def _send(self, body: bytes) -> None:
        if self.is_ended:
            raise asyncio.CancelledError
        if not self._has_begun:
            self._has_begun = True
            self.send_headers(blocks.begin(self._encoding))
        flag = 0
        if self._encoding:
            flag, body = 1, self._calls.compressor.deflate(body, self._encoding)
        self.send((_PREFIX.pack(flag, len(body)), body))
        if self.is_blocked:
            self._drain = self._calls.loop.create_future()
            await self._drain

    def _gathered(self, inbox: Inbox, ended: bool) -> None:
        self._unread_bytes = sum(len(body) + PREFIX_BYTES for _, body in inbox.complete)
        self._invite(inbox)
        if inbox.complete or ended:
            _wake(self._arrival)

    def _invite(self, inbox: Inbox) -> None:
        """Let the client send: as much as is not read less than a window, and what its message lacks."""
        window = self.connection.limits.stream_window
        wanted = window - self._unread_bytes - self.receive_window
        missing = 0 if inbox.complete else inbox.missing_bytes
        if wanted + missing >= window >> 1 or missing > self.receive_window:
            self.credit(wanted + missing)

    def _send_status(self, code: int, message: str) -> None:
        if not self._has_begun:
            self.end(blocks.refusal(code, message))
        elif self.is_blocked and code:
            self.abandon(frames.CANCEL)  # what waits will not go, and a status must not pass it
        else:
            self.end(blocks.trailers(code, message))

    def _cancel_handler(self) -> None:
        self._task.cancel()


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
