"""Calls with any number of messages in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from headrace.errors import Unavailable
from headrace.off_loop import LARGE_BYTES, TooLargeForLoop
from headrace_grpc.call_headers import CallHead, begin_block, refusal, trailers
from headrace_grpc.calls import CallState, GrpcCall
from headrace_grpc.http2 import frames
from headrace_grpc.http2.connection import Connection
from headrace_grpc.infer import SHUTTING_DOWN
from headrace_grpc.message_framing import PREFIX, MessageAssembler
from headrace_grpc.status import CANCELLED, INTERNAL, OK, Status

#: The assumed cost of a message, without its bytes.
_MESSAGE_NS = 30_000


class StreamCall(GrpcCall):
    """Runs its handler in a task. A handler that does not read stops the client, and the other way round."""

    __slots__ = ("_arrival", "_drain", "_has_begun")

    def __init__(self, connection: Connection, id: int, calls: CallState, head: CallHead) -> None:
        GrpcCall.__init__(self, connection, id, calls, head)
        self._assembler = assembler = MessageAssembler(calls.take_received)
        self._arrival: asyncio.Future[None] | None = None
        self._drain: asyncio.Future[None] | None = None
        self._has_begun = False
        connection.memory.long_calls += 1
        self._begin_task(self._run(assembler))

    def drained(self) -> None:
        _wake(self._drain)

    def sweep(self, now: float) -> None:
        assembler = self._assembler
        assert assembler is not None
        is_held = self.receive_window <= 0 or self.connection.memory.holds_back(self)
        if self.is_ended or is_held or assembler.is_between:
            assembler.goes_on()
        else:
            self._require_progress(now)

    def shut_down(self) -> None:
        _wake(self._arrival)

    async def _run(self, assembler: MessageAssembler) -> None:
        rpc = self._head.rpc
        assert rpc.stream is not None
        try:
            await rpc.stream(self._requests(assembler), self._send, self)
        except asyncio.CancelledError:
            self.finish(CANCELLED, "the call was cancelled")
        except Exception as error:
            self.fail(error)
        else:
            self.finish(OK)

    def done(self) -> None:
        if self.is_busy:
            self.connection.memory.long_calls -= 1
        GrpcCall.done(self)

    async def _requests(self, assembler: MessageAssembler) -> AsyncIterator[Any]:
        parse, turns = self._head.rpc.parse, self.connection.turns
        while True:
            while assembler.complete:
                if turns.left_ns < 0 and turns.is_over():
                    await turns.task_turn()
                flag, body = assembler.take()
                if self.is_counted:
                    self.connection.memory.release(self, assembler.kept_bytes)
                turns.left_ns -= _MESSAGE_NS + len(body)
                self._invite(assembler)
                try:
                    request = parse(self._inflated(flag, body, LARGE_BYTES) if flag else body)
                except TooLargeForLoop:
                    request = await self._calls.large.run(partial(self._read, flag, body))
                yield request
            if self.is_remote_closed:
                break
            if self._calls.draining:
                raise Unavailable(SHUTTING_DOWN)
            self._arrival = self._calls.loop.create_future()
            await self._arrival
        if not assembler.is_between:
            raise Status(INTERNAL, "the last request message is incomplete")

    async def _send(self, body: bytes) -> None:
        turns = self.connection.turns
        if turns.left_ns < 0 and turns.is_over():
            await turns.task_turn()
        turns.left_ns -= _MESSAGE_NS
        if self.is_ended:
            raise asyncio.CancelledError
        encoding = self._head.answers
        if not self._has_begun:
            self._has_begun = True
            self.send_headers(begin_block(encoding))
        if encoding:
            pack = partial(self._calls.compressor.deflate, body, encoding)
            body = pack() if len(body) <= LARGE_BYTES else await self._calls.large.run(pack)
        if self.connection.memory.unread_bytes:
            self._require_room(len(body))
        self.send((PREFIX.pack(bool(encoding), len(body)), body))
        if self.is_blocked:
            self._drain = self._calls.loop.create_future()
            await self._drain

    def _gathered(self, assembler: MessageAssembler, ended: bool) -> None:
        self._invite(assembler)
        if assembler.complete or ended:
            _wake(self._arrival)

    def _invite(self, assembler: MessageAssembler) -> None:
        """Let the client send as much as fits: a window minus the unread bytes, and the rest of its message."""
        window = self.connection.limits.stream_window
        wanted = window - assembler.complete_bytes - self.receive_window
        missing = 0 if assembler.complete else assembler.missing_bytes
        if missing > window:
            if missing > self.receive_window:
                self._grant(assembler.size_bytes, wanted + missing)
        elif wanted + missing >= window >> 1 or missing > self.receive_window:
            self.credit(wanted + missing)

    def _send_status(self, code: int, message: str, pushback: int | None = None) -> None:
        if not self._has_begun:
            self.end(refusal(code, message, pushback=pushback))
        elif self.is_blocked and code:
            self.abandon(frames.CANCEL)  # the waiting data will not be sent, and a status must not overtake it
        else:
            self.end(trailers(code, message, pushback))


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
