"""gRPC calls as HTTP/2 streams: what they have in common, and those with one message each way.

::

    DirectCall    one message in, one out, by callback: the hot path
    UnaryCall     the same, with a task for its handler
    StreamCall    any number of each, with a task for its handler (module ``streaming``)
    RefusedCall   ended by its headers

A call `is_ended` once its status is decided, or once nobody is left to hear it. What its handler
says afterwards is not heard. Everything runs on the event loop, except that large messages are
read and packed on the threads of `headrace.large`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError

from headrace.errors import HeadraceError
from headrace.frontends.failures import tell_fault
from headrace.frontends.grpc import blocks
from headrace.frontends.grpc.call_head import CallHead, Refusal
from headrace.frontends.grpc.compression import IDENTITY, bound, inflate
from headrace.frontends.grpc.context import Cancel, Metadata
from headrace.frontends.grpc.hosts import OUT_OF_TIME
from headrace.frontends.grpc.infer import SHUTTING_DOWN
from headrace.frontends.grpc.message_assembler import PREFIX, PREFIX_BYTES, MessageAssembler
from headrace.frontends.grpc.rpcs import serialize
from headrace.frontends.grpc.status import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    STATUS,
    UNAVAILABLE,
    UNIMPLEMENTED,
    Status,
)
from headrace.frontends.grpc.wire import Buffer
from headrace.frontends.http2.connection import Connection
from headrace.frontends.http2.stream import Stream
from headrace.large import LARGE_BYTES, UNBOUNDED, Large
from headrace.telemetry.pacing import paced

if TYPE_CHECKING:
    from headrace.frontends.grpc.native_host import Calls

log = paced(__name__)

T = TypeVar("T")

_BEGIN = blocks.begin()
#: Pieces of a message that are smaller, and not its last, are counted like frames without a use.
_FRAGMENT_BYTES = 64
#: What beginning a task is taken to cost, in the turn of the loop in which it begins.
_TASK_NS = 50_000


class RefusedCall(Stream):
    """Ended by its headers."""

    __slots__ = ()

    def __init__(self, connection: Connection, id: int, refusal: Refusal) -> None:
        Stream.__init__(self, connection, id)
        self.end(refusal.block)


class Call(Stream):
    """What all other calls have in common. Handlers see it as their ``Context``."""

    __slots__ = ("_assembler", "_calls", "_cancel", "_head", "_timer", "is_ended")

    def __init__(self, connection: Connection, id: int, calls: Calls, head: CallHead) -> None:
        Stream.__init__(self, connection, id)
        self._calls = calls
        self._head = head
        self._assembler: MessageAssembler | None = None
        #: Tells the handler that nobody waits for it.
        self._cancel: Cancel | None = None
        self._timer = calls.loop.call_later(head.timeout, self._expire) if head.timeout else None
        self.is_ended = False

    # ------------------------------------------------------------------ handlers call

    @property
    def metadata(self) -> Metadata:
        return self._head.metadata

    @property
    def peer(self) -> str:
        return self.connection.peer

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        return self.connection.certificate

    @property
    def draining(self) -> bool:
        return self._calls.draining

    # ------------------------------------------------------------------ the stream calls

    def data_received(self, data: Buffer, ended: bool) -> None:
        if self._assembler is None:
            self._assembler = MessageAssembler()
        assembler = self._assembler
        try:
            assembler.append(data)
            self._gathered(assembler, ended)
        except Status as status:
            self.fail(status)
        if len(data) < _FRAGMENT_BYTES and not ended and not assembler.is_between:
            self.connection.count_idle()

    def tail(self, size_bytes: int) -> memoryview | None:
        assembler = self._assembler
        if assembler is None or not assembler.is_coming or self.is_ended:
            return None
        try:
            return assembler.tail(size_bytes)
        except Status as status:
            self.fail(status)
            return None

    def tail_received(self, size_bytes: int, ended: bool) -> None:
        assert self._assembler is not None
        self._assembler.advance(size_bytes)
        try:
            self._gathered(self._assembler, ended)
        except Status as status:
            self.fail(status)

    def lost(self) -> None:
        if not self.is_ended:
            self._end()
            self._cancel_handler()

    def expel(self) -> None:
        self.finish(UNAVAILABLE, OUT_OF_TIME)
        self._cancel_handler()

    # ------------------------------------------------------------------ ending

    def fail(self, reason: Exception) -> None:
        """End the call with the status of ``reason``; what is not ours is logged and not shown."""
        if isinstance(reason, HeadraceError):
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

    def _require_progress(self, now: float) -> None:
        """End the call if its message, or the rest of it, has not gone on to arrive for too long."""
        if self._assembler is None:
            self._assembler = MessageAssembler()
        limits = self.connection.limits
        if self._assembler.stalled_seconds(now) > limits.message_seconds:
            text = f"The request message has not gone on to arrive for {limits.message_seconds:g} s."
            self.finish(DEADLINE_EXCEEDED, text)
            self._cancel_handler()

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
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    # ------------------------------------------------------------------ the forms say

    @abstractmethod
    def _gathered(self, assembler: MessageAssembler, ended: bool) -> None:
        """Something has come, and perhaps all. Raises `Status`."""

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Let ``work``, which ends with `done`, answer the call."""
        self.is_busy = True
        self.connection.turns.left_ns -= _TASK_NS
        self._cancel = self._calls.loop.create_task(work).cancel

    def _inflated(self, flag: int, body: Buffer, patience: int) -> Buffer:
        """What ``body`` is without compression. Raises `Status`, and `Large` beyond ``patience`` bytes."""
        if not flag:
            return body
        encoding = self._head.encoding
        if encoding == IDENTITY:
            raise Status(INTERNAL, "Compression bit set but no encoding configured")
        return inflate(body, encoding, bound(len(body), self._calls.inflated_bytes), patience)

    def _read(self, flag: int, body: Buffer) -> Any:
        """The request in a large message. On a thread."""
        rpc = self._head.rpc
        return (rpc.parse_large or rpc.parse)(self._inflated(flag, body, UNBOUNDED))

    def _begin_large(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Let a thread do ``work``, unless the call ends before."""
        leave = self._calls.large.begin(work, done)

        def cancel() -> None:
            leave()
            self.done()

        self.is_busy = True
        self._cancel = cancel


class SingleCall(Call):
    """One message in, one out."""

    __slots__ = ()

    def data_received(self, data: Buffer, ended: bool) -> None:
        size = len(data) - PREFIX_BYTES
        if ended and self._assembler is None and size >= 0 and PREFIX.unpack_from(data) == (0, size):
            self._start(0, bytes(data[PREFIX_BYTES:]))  # nearly always
        else:
            Call.data_received(self, data, ended)

    def _gathered(self, assembler: MessageAssembler, ended: bool) -> None:
        if self.is_ended:
            return
        complete = assembler.complete
        if len(complete) > 1 or (complete and not assembler.is_between):
            raise Status(UNIMPLEMENTED, "more than one request message")
        if not ended:
            self.credit(assembler.missing_bytes - self.receive_window)
            return
        if not assembler.is_between:
            raise Status(INTERNAL, "the request message is incomplete")
        if not complete:
            raise Status(UNIMPLEMENTED, "no request message")
        self._start(*assembler.take())

    def _start(self, flag: int, body: Buffer) -> None:
        """Let the handler begin."""
        self.is_busy = True
        try:
            self._handle(self._head.rpc.parse(self._inflated(flag, body, LARGE_BYTES) if flag else body))
        except Large:
            self._start_large(flag, body)
        except Exception as error:
            self.fail(error)
            self.done()

    def _start_large(self, flag: int, body: Buffer) -> None:
        try:
            self._begin_large(partial(self._read, flag, body), self._read_done)
        except HeadraceError as error:  # too many wait
            self.fail(error)
            self.done()

    def _read_done(self, outcome: Any) -> None:
        self._cancel = None
        try:
            if isinstance(outcome, Exception):
                raise outcome
            self._handle(outcome)
        except Exception as error:
            self.fail(error)
            self.done()
        finally:
            del outcome  # an error and the frame that has it would keep each other, and the body, for the collector

    def look(self, now: float) -> None:
        if not (self.is_busy or self.is_ended):
            self._require_progress(now)

    def farewell(self) -> None:
        if not self.is_busy:  # its message is not there
            self.finish(UNAVAILABLE, SHUTTING_DOWN)

    @abstractmethod
    def _handle(self, request: Any) -> None:
        """Let the handler answer ``request``. What it raises ends the call."""

    def succeed(self, body: bytes) -> None:
        """End the call with an answer."""
        if self.is_ended:
            return
        encoding = self._head.answers
        if not encoding:
            self._end()
            self.respond(_BEGIN, PREFIX.pack(0, len(body)), body, blocks.SUCCESS)
        elif len(body) <= LARGE_BYTES:
            self._succeed_packed(self._calls.compressor.deflate(body, encoding))
        else:
            try:
                self._begin_large(partial(self._calls.compressor.deflate, body, encoding), self._packed)
            except HeadraceError as error:  # too many wait
                self.fail(error)

    def _packed(self, outcome: bytes | Exception) -> None:
        self._cancel = None
        if isinstance(outcome, Exception):
            self.fail(outcome)
        elif not self.is_ended:
            self._succeed_packed(outcome)
        self.done()

    def _succeed_packed(self, body: bytes) -> None:
        self._end()
        self.respond(blocks.begin(self._head.answers), PREFIX.pack(1, len(body)), body, blocks.SUCCESS)


class DirectCall(SingleCall):
    """By callback."""

    __slots__ = ()

    def _start(self, flag: int, body: Buffer) -> None:
        rpc = self._head.rpc
        assert rpc.direct is not None
        self.is_busy = True
        try:
            request = rpc.parse(self._inflated(flag, body, LARGE_BYTES) if flag else body)
            cancel = rpc.direct(request, self, self._reply)
        except Large:
            self._start_large(flag, body)
        except Exception as error:
            self.fail(error)
            self.done()
        else:
            self._cancel = cancel if self.is_busy else None

    def _handle(self, request: Any) -> None:
        direct = self._head.rpc.direct
        assert direct is not None
        cancel = direct(request, self, self._reply)
        self._cancel = cancel if self.is_busy else None

    def _reply(self, answer: bytes | HeadraceError) -> None:
        self._cancel = None
        if self.is_closed:
            self.done()  # the caller has gone
            return
        self.is_busy = False
        if isinstance(answer, bytes):
            self.succeed(answer)
        else:
            self.fail(answer)


class HeldCall(DirectCall):
    """One that begins when its client has read some of what waits for it."""

    __slots__ = ()

    def _start(self, flag: int, body: Buffer) -> None:
        self.is_busy = True
        self.sender.held.append(partial(self._begin, flag, body))

    def _begin(self, flag: int, body: Buffer) -> None:
        if self.is_ended:
            self.done()
        else:
            DirectCall._start(self, flag, body)


class UnaryCall(SingleCall):
    """By a task."""

    __slots__ = ()

    def _handle(self, request: Any) -> None:
        self._begin_task(self._run(request))

    async def _run(self, request: Any) -> None:
        rpc = self._head.rpc
        assert rpc.unary is not None
        try:
            self.succeed(serialize(await rpc.unary(request, self)))
        except asyncio.CancelledError:
            self.finish(CANCELLED, "the call was cancelled")
        except Exception as error:
            if isinstance(error, HeadraceError):
                tell_fault(error, rpc.name)
            self.fail(error)
        finally:
            self.done()
