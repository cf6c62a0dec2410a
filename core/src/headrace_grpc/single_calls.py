"""Calls with one message each way: by callback, which is the hot path, or by a task."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from functools import partial
from typing import Any

from headrace.errors import HeadraceError
from headrace.frontends.failures import log_fault
from headrace.off_loop import LARGE_BYTES, TooLargeForLoop
from headrace_grpc.call_headers import SUCCESS, begin_block
from headrace_grpc.calls import GrpcCall
from headrace_grpc.infer import SHUTTING_DOWN
from headrace_grpc.message_framing import PREFIX, PREFIX_BYTES, MessageAssembler
from headrace_grpc.rpc import serialize
from headrace_grpc.status import CANCELLED, INTERNAL, UNAVAILABLE, UNIMPLEMENTED, Status
from headrace_grpc.wire import COUNTED_BYTES, Buffer

_BEGIN = begin_block()


class SingleCall(GrpcCall):
    """One message in, one out."""

    __slots__ = ()

    def data_received(self, data: Buffer, ended: bool) -> None:
        size = len(data) - PREFIX_BYTES
        if ended and self._assembler is None and size >= 0 and PREFIX.unpack_from(data) == (0, size):
            if size > COUNTED_BYTES:
                memory = self.connection.memory
                memory.keep(self, size)
                if memory.budget.is_tight and memory.budget.is_full:
                    memory.budget.refuse(self, "has arrived")
                    return
            self._start(0, bytes(data[PREFIX_BYTES:]))  # nearly always
        else:
            GrpcCall.data_received(self, data, ended)

    def _gathered(self, assembler: MessageAssembler, ended: bool) -> None:
        if self.is_ended:
            return
        complete = assembler.complete
        if len(complete) > 1 or (complete and not assembler.is_between):
            raise Status(UNIMPLEMENTED, "more than one request message")
        if not ended:
            missing = assembler.missing_bytes - self.receive_window
            if missing > 0:
                self._grant(assembler.size_bytes, missing)
            return
        if not assembler.is_between:
            raise Status(INTERNAL, "the request message is incomplete")
        if not complete:
            raise Status(UNIMPLEMENTED, "no request message")
        self._start(*assembler.take())

    def _start(self, flag: int, body: Buffer) -> None:
        """Parse the message and start the handler."""
        self.is_busy = True
        try:
            self._handle(self._head.rpc.parse(self._inflated(flag, body, LARGE_BYTES) if flag else body))
        except TooLargeForLoop:
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
            del outcome  # an error and the frame that holds it would keep each other, and the body

    def sweep(self, now: float) -> None:
        if self.is_busy or self.is_ended:
            return
        if self.connection.memory.holds_back(self):
            assert self._assembler is not None
            self._assembler.goes_on()
        else:
            self._require_progress(now)

    def shut_down(self) -> None:
        if not self.is_busy:  # its message has not arrived
            self.finish(UNAVAILABLE, SHUTTING_DOWN)

    @abstractmethod
    def _handle(self, request: Any) -> None:
        """Let the handler answer ``request``. An exception ends the call."""

    def succeed(self, body: bytes) -> None:
        """End the call with an answer."""
        if self.is_ended:
            return
        encoding = self._head.answers
        if not encoding:
            self._end()
            self.respond(_BEGIN, PREFIX.pack(0, len(body)), body, SUCCESS)
        elif len(body) <= LARGE_BYTES:
            self._succeed_packed(self._calls.compressor.deflate(body, encoding))
        else:
            try:
                self._begin_large(partial(self._calls.compressor.deflate, body, encoding), self._packed)
            except HeadraceError as error:  # too many wait
                self.fail(error)

    def may_wait(self, size_bytes: int) -> bool:
        if self.is_counted:
            self.connection.memory.release(self)  # the answer counts instead
        try:
            self._require_room(size_bytes)
        except Status as status:
            self._send_status(status.code, status.message)
            return False
        return True

    def _packed(self, outcome: bytes | Exception) -> None:
        self._cancel = None
        if isinstance(outcome, Exception):
            self.fail(outcome)
        elif not self.is_ended:
            self._succeed_packed(outcome)
        self.done()

    def _succeed_packed(self, body: bytes) -> None:
        self._end()
        self.respond(begin_block(self._head.answers), PREFIX.pack(1, len(body)), body, SUCCESS)


class DirectCall(SingleCall):
    """Answers by callback."""

    __slots__ = ()

    def _start(self, flag: int, body: Buffer) -> None:
        rpc = self._head.rpc
        assert rpc.direct is not None
        self.is_busy = True
        try:
            request = rpc.parse(self._inflated(flag, body, LARGE_BYTES) if flag else body)
            cancel = rpc.direct(request, self, self._reply)
        except TooLargeForLoop:
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
            self.done()  # the caller has disconnected
            return
        self.is_busy = False
        if isinstance(answer, bytes):
            self.succeed(answer)
        else:
            self.fail(answer)


class HeldCall(DirectCall):
    """Starts when its client has read some of its waiting answers."""

    __slots__ = ()

    def _start(self, flag: int, body: Buffer) -> None:
        self.is_busy = True
        self.connection.memory.hold_back(partial(self._begin, flag, body))

    def _begin(self, flag: int, body: Buffer) -> None:
        if self.is_ended:
            self.done()
        else:
            DirectCall._start(self, flag, body)


class UnaryCall(SingleCall):
    """Answers by a task."""

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
                log_fault(error, rpc.name)
            self.fail(error)
