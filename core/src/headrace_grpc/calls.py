"""The common base of gRPC calls as HTTP/2 streams.

::

    DirectCall    one message in, one out, by callback: the hot path (module ``single_calls``)
    UnaryCall     the same, with a task for its handler
    StreamCall    any number of each, with a task for its handler (module ``stream_calls``)
    RefusedCall   ended by its headers

A call `is_ended` when its status is decided, or when its caller has disconnected. Later answers of its handler are
dropped. Everything runs on the event loop, but large messages are parsed and compressed on the threads of
`headrace.off_loop`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from time import monotonic_ns
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from headrace.config.options import ServerOptions
from headrace.errors import HeadraceError
from headrace.off_loop import UNBOUNDED, OffLoopWork
from headrace.telemetry.log_limits import rate_limited_logger
from headrace_grpc.call_headers import CallHead, Refusal, refusal
from headrace_grpc.http2.connection import Connection
from headrace_grpc.http2.stream import Stream
from headrace_grpc.infer import OUT_OF_TIME
from headrace_grpc.message_framing import IDENTITY, Compressor, MessageAssembler, bound, inflate
from headrace_grpc.rpc import Cancel, Metadata
from headrace_grpc.status import (
    DEADLINE_EXCEEDED,
    INTERNAL,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Status,
    pushback_ms,
    status_of,
)
from headrace_grpc.wire import COUNTED_BYTES, Buffer
from headrace_hosts.held_memory import no_memory
from headrace_hosts.inflating import Take, new_memory

log = rate_limited_logger(__name__)

T = TypeVar("T")

#: Smaller pieces of a message, except the last one, count like useless frames.
_FRAGMENT_BYTES = 64
#: Larger messages lie in pages of 2 MiB.
_FIRST_BYTES, _PAGE_BYTES = 1 << 20, 2 << 20
#: The assumed cost of starting a task, in the turn of the loop in which it starts.
_TASK_NS = 50_000


class CallState:
    """The objects that all calls of a host share. If ``draining``, no further requests are taken."""

    def __init__(
        self,
        options: ServerOptions,
        large: OffLoopWork,
        take: Take = new_memory,
        take_received: Take = new_memory,
    ) -> None:
        """``take`` returns memory for decompressed messages, and ``take_received`` for those that arrive in pieces."""
        self.loop = asyncio.get_running_loop()
        self.draining = False
        #: The tasks that answer calls. The event loop itself keeps no reference to them.
        self.tasks: set[asyncio.Task[None]] = set()
        self.large, self.take, self.take_received = large, take, take_received
        self.inflated_bytes = options.grpc_max_decompressed_size
        self.compressor = Compressor(options.grpc_infer_response_compression_level)


class RefusedCall(Stream):
    """A call that its headers have ended."""

    __slots__ = ()

    def __init__(self, connection: Connection, id: int, refused: Refusal) -> None:
        Stream.__init__(self, connection, id)
        self.is_remote_closed = connection.is_whole
        self.end(refused.block)


class GrpcCall(Stream):
    """The base class of all other calls. Handlers get it as their ``Context``."""

    __slots__ = ("_assembler", "_calls", "_cancel", "_head", "_timer", "deadline_ns", "is_ended")

    def __init__(self, connection: Connection, id: int, calls: CallState, head: CallHead) -> None:
        Stream.__init__(self, connection, id)
        self._calls = calls
        self._head = head
        self._assembler: MessageAssembler | None = None
        #: Cancels the handler, because its caller has disconnected.
        self._cancel: Cancel | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.deadline_ns = 0
        if head.timeout:
            self._timer = calls.loop.call_later(head.timeout, self._expire)
            self.deadline_ns = monotonic_ns() + int(head.timeout * 1e9)
        self.is_ended = False

    # ------------------------------------------------------------------ handlers call

    @property
    def metadata(self) -> Metadata:
        return self._head.metadata

    def only(self, name: bytes) -> str | None:
        return self._head.only(name)

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        return self.connection.certificate

    @property
    def has_left(self) -> bool:
        return self.is_ended

    @property
    def draining(self) -> bool:
        return self._calls.draining

    @property
    def streams(self) -> int:
        return self.connection.memory.long_calls

    # ------------------------------------------------------------------ the stream calls

    def data_received(self, data: Buffer, ended: bool) -> None:
        if self._assembler is None:
            self._assembler = MessageAssembler(self._calls.take_received)
        assembler = self._assembler
        try:
            assembler.append(data)
            self._keep(assembler)
            self._gathered(assembler, ended)
        except (Status, MemoryError) as reason:
            self.fail(reason)
        if len(data) < _FRAGMENT_BYTES and not ended and not assembler.is_between:
            self.connection.allowance.count_idle()

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
        self._keep(self._assembler)
        try:
            self._gathered(self._assembler, ended)
        except Status as status:
            self.fail(status)

    def lost(self) -> None:
        if not self.is_ended:
            self._end()
            self._cancel_handler()

    def terminate(self) -> None:
        self.finish(UNAVAILABLE, OUT_OF_TIME)
        self._cancel_handler()

    # ------------------------------------------------------------------ ending

    def fail(self, reason: Exception) -> None:
        """End the call with the status of ``reason``. Log an unexpected exception instead of showing it."""
        if isinstance(reason, HeadraceError):
            self.finish(status_of(reason), reason.message, pushback_ms(reason))
        elif isinstance(reason, Status):
            self.finish(reason.code, reason.message)
        elif isinstance(reason, DecodeError):
            self.finish(INTERNAL, "Unable to parse request")
        elif isinstance(reason, MemoryError):
            self.finish(RESOURCE_EXHAUSTED, "the server has no memory for the call")
        else:
            log.error("a gRPC handler failed", exc_info=reason)
            self.finish(INTERNAL, "internal error; the server's log has the details")

    def refuse(self, reason: str) -> None:
        """End the call: there is no memory for the rest of its message."""
        self.fail(no_memory(reason))
        self._assembler = None
        self._cancel_handler()

    def finish(self, code: int, message: str = "", pushback: int | None = None) -> None:
        """End the call, unless it has ended. The client may try again in ``pushback`` ms, if that is known."""
        if not self.is_ended:
            self._end()
            self._send_status(code, message, pushback)

    def _require_progress(self, now: float) -> None:
        """End the call if no more of its message has arrived for too long."""
        if self._assembler is None:
            self._assembler = MessageAssembler(self._calls.take_received)
        limits = self.connection.limits
        if self._assembler.stalled_seconds(now) > limits.message_seconds:
            text = f"No more of the request message has arrived for {limits.message_seconds:g} s."
            self.finish(DEADLINE_EXCEEDED, text)
            self._cancel_handler()

    def _end(self) -> None:
        self.is_ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _send_status(self, code: int, message: str, pushback: int | None = None) -> None:
        self.end(refusal(code, message, pushback=pushback))

    def _expire(self) -> None:
        self.finish(DEADLINE_EXCEEDED, "Deadline Exceeded")
        self._cancel_handler()

    def _cancel_handler(self) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    def _keep(self, assembler: MessageAssembler) -> None:
        """Count the received bytes, if they are many, or will be."""
        kept = assembler.kept_bytes
        if kept > COUNTED_BYTES or (kept and assembler.missing_bytes > COUNTED_BYTES):
            memory = self.connection.memory
            memory.keep(self, kept if kept <= _FIRST_BYTES else -(-kept // _PAGE_BYTES) * _PAGE_BYTES)
            if memory.budget.is_tight and not (assembler.is_between or memory.may_end(self, assembler.missing_bytes)):
                memory.budget.refuse(self, "arrives")

    def _grant(self, message_bytes: int, size_bytes: int) -> None:
        """Let the client send ``size_bytes`` more of a message of ``message_bytes``, when there is memory for it.

        Raises `Status` if it is larger than the memory budget.
        """
        memory = self.connection.memory
        if message_bytes > memory.budget.largest_bytes:
            raise Status(
                RESOURCE_EXHAUSTED,
                f"Received message larger than max ({message_bytes} vs. {memory.budget.largest_bytes}): all requests "
                "and responses together may not take more. Use --memory-budget to increase the limit.",
            )
        memory.grant(self, size_bytes)

    def _require_room(self, size_bytes: int) -> None:
        """Raise `Status` if an answer of ``size_bytes`` is too large together with the unread ones."""
        memory = self.connection.memory
        if not memory.has_room(size_bytes):
            raise Status(
                RESOURCE_EXHAUSTED,
                f"the client does not read: {memory.unread_bytes} bytes of answers wait on its connection, and more "
                f"than {self.connection.limits.unread_bytes} may not (--grpc-max-unread-size)",
            )

    # ------------------------------------------------------------------ the forms say

    @abstractmethod
    def _gathered(self, assembler: MessageAssembler, ended: bool) -> None:
        """Handle received bytes, perhaps the last. Raises `Status`."""

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Answer the call by a task that runs ``work``."""
        self.is_busy = True
        self.connection.turns.left_ns -= _TASK_NS
        task = self._calls.loop.create_task(work)
        self._calls.tasks.add(task)
        task.add_done_callback(self._calls.tasks.discard)
        task.add_done_callback(self._task_done)  # a task that is cancelled before it starts runs none of its code
        self._cancel = task.cancel

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.done()

    def _inflated(self, flag: int, body: Buffer, loop_limit_bytes: int) -> Buffer:
        """Return ``body`` decompressed. Raises `Status`, and `TooLargeForLoop` beyond ``loop_limit_bytes``."""
        if not flag:
            return body
        encoding = self._head.encoding
        if encoding == IDENTITY:
            raise Status(INTERNAL, "Compression bit set but no encoding configured")
        calls = self._calls
        return inflate(body, encoding, bound(len(body), calls.inflated_bytes), loop_limit_bytes, calls.take)

    def _read(self, flag: int, body: Buffer) -> Any:
        """Return the request in a large message. Runs on a thread."""
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
