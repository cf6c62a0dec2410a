"""``ModelStreamInfer``: many requests and their responses on one call.

Responses of models that are not decoupled are sent in the order of the requests. Those of decoupled models are sent as
they are produced, and a client that does not read stops the model. A request that fails does not end the stream.
Source: docs/spec/behaviours.md section 2.5.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, InternalError, Unavailable
from headrace.frontends.failures import Failure, log_failure, without_paths
from headrace.messages.request import log_id
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.off_loop import LARGE_BYTES, UNBOUNDED, TooLargeForLoop
from headrace.telemetry.log_limits import rate_limited_logger
from headrace_grpc.admitted_calls import AdmittedMessage, admit_messages
from headrace_grpc.decode import Change, Decoded
from headrace_grpc.encode import encode, encode_empty, pack_stream
from headrace_grpc.infer import SHUTTING_DOWN, Inference, decode_large
from headrace_grpc.rpc import Context, Send, first
from headrace_grpc.usual_messages import ReadMessage
from headrace_grpc.wire import COUNTED_BYTES

if TYPE_CHECKING:
    from headrace.engine import Caller, ModelView

log = rate_limited_logger(__name__)

#: At most this many unanswered requests per stream; beyond it, the stream is not read. Their bytes, and the estimated
#: bytes of their answers, are limited, too (``--grpc-max-stream-size``).
IN_FLIGHT = 1024
#: The same for all streams of a connection together, which also share the bytes of ``--grpc-max-unread-size``.
IN_FLIGHT_TOGETHER = 8192
#: At most this many unsent answers per stream; beyond it, the stream is not read. A refusal counts no bytes, takes a
#: few KiB, and can be caused by five bytes.
UNSENT = 64


async def model_stream_infer(
    inference: Inference, requests: AsyncIterator[ReadMessage], send: Send, context: Context
) -> None:
    """Answer ``requests`` by serialized ``ModelStreamInferResponse``s until all are answered.

    A cancellation, or an exception of ``send``, cancels the requests in flight. With the metadata
    ``triton_grpc_error: true``, raises the first error of a model. An exception of ``requests`` ends the stream:
    `Unavailable` after the requests in flight are answered, another one at once.
    """
    stream = _Stream(inference, context)
    admission = inference.admission
    reader = asyncio.ensure_future(
        stream.read(requests)
        if admission is None
        else stream.read_admitted(admit_messages(requests, context, admission, inference.off_loop_work))
    )
    inference.readers.add(reader)
    reader.add_done_callback(inference.readers.discard)
    reader.add_done_callback(stream.half_close)
    inference.streams.add(stream.end)
    try:
        await stream.write(send)
    finally:
        inference.streams.discard(stream.end)
        reader.cancel()
        stream.cancel()
        stream.release()
        await asyncio.wait((reader,))  # its source must not be closed while it reads


class _Turn:
    """One request of a stream."""

    __slots__ = (
        "_stream",
        "answers",
        "classes",
        "empty_final",
        "is_answered",
        "is_over",
        "is_queued",
        "message",
        "size_bytes",
        "ticket",
        "view",
    )

    def __init__(self, stream: _Stream, raw_request: ReadMessage) -> None:
        self._stream = stream
        #: Of the request.
        self.size_bytes = len(raw_request.body)
        self.message = raw_request.message
        self.view: ModelView | None = None
        self.ticket: Ticket | None = None
        self.classes: Mapping[str, Change] = {}
        self.empty_final = False
        #: True if the server has accepted the request; errors before that have another form.
        self.is_queued = False
        self.is_answered = False
        #: True if further answers are dropped.
        self.is_over = False
        #: Answers that wait for earlier requests.
        self.answers: list[tuple[Answer, bool]] = []

    @property
    def caller(self) -> Caller | None:
        """The caller of the request, on a server with interceptors."""
        return None

    @property
    def is_ordered(self) -> bool:
        return self.view is None or not self.view.decoupled

    def take(self, decoded: Decoded) -> Ticket:
        """Return the ticket of the decoded request."""
        self.classes, self.empty_final = decoded.classes, decoded.empty_final
        if deadline_ns := self._stream.deadline_ns:
            decoded.request.expire_at(deadline_ns)
        self.ticket = ticket = self._stream.ticket(decoded.request, self.respond)
        return ticket

    def respond(self, answer: Answer, final: bool) -> None:
        if not self.is_over:
            self._stream.answer(self, answer, final)

    def encode(self, answer: InferResponse | None, final: bool, loop_limit_bytes: int) -> bytes | None:
        """Return the message for ``answer``, or None if there is none to send. Raises as `encode` does."""
        if answer is not None:
            assert self.view is not None
            return pack_stream(encode(answer, self.view, self.classes, final, loop_limit_bytes))
        if self.is_ordered:
            raise InternalError("expected a single response, got 0")
        return pack_stream(self._empty(final)) if self.empty_final else None

    def encode_error(self, error: HeadraceError, final: bool) -> bytes:
        body = self._empty(final) if self.is_queued else encode_empty(self.message.id)
        return pack_stream(body, without_paths(error.message))

    def _empty(self, final: bool) -> bytes:
        message = self.message
        return encode_empty(message.id, message.model_name, message.model_version, final)


class _AdmittedTurn(_Turn):
    """One request of a stream on a server with interceptors. Its operation ends with its last answer."""

    __slots__ = ("_caller",)

    def __init__(self, stream: _Stream, message: AdmittedMessage) -> None:
        super().__init__(stream, message.request)
        self._caller = message.caller

    @property
    def caller(self) -> Caller | None:
        return self._caller

    def respond(self, answer: Answer, final: bool) -> None:
        super().respond(answer, final)
        if final and self._caller is not None:
            self._caller.end(answer if isinstance(answer, HeadraceError) else None)


class _Stream:
    """The requests in flight on one call, which hold memory. Event loop only."""

    waits_for_peer = is_slow = False

    def __init__(self, inference: Inference, context: Context) -> None:
        self._inference = inference
        self._context = context
        self.deadline_ns = context.deadline_ns
        self._errors_end = first(context.metadata, "triton_grpc_error") == "true"
        self._open: set[_Turn] = set()
        self._in_order: deque[_Turn] = deque()
        self._ready: deque[tuple[_Turn, Answer, bool]] = deque()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self.ticket = inference.ticket
        self._limit_bytes = inference.options.grpc_max_stream_size
        self._limit_together = inference.options.grpc_max_unread_size
        #: Of requests in flight, and of unsent answers.
        self._held_bytes = 0
        self._is_counted = False  # in the memory budget
        self._largest_bytes = 0
        self._is_read = False
        self._failure: BaseException | None = None

    async def read(self, requests: AsyncIterator[ReadMessage]) -> None:
        """Start every request, while there is room."""
        async for raw_request in requests:
            await self._start(_Turn(self, raw_request), raw_request)
            while self._is_full():
                await self._wait_for_room()

    async def read_admitted(self, messages: AsyncIterator[AdmittedMessage]) -> None:
        """`read` on a server with interceptors, which may have refused some messages."""
        async for message in messages:
            turn = _AdmittedTurn(self, message)
            if message.refusal is None:
                await self._start(turn, message.request)
            else:
                self._open.add(turn)
                self._held_bytes += turn.size_bytes
                if turn.size_bytes > COUNTED_BYTES:
                    self._count()
                self._in_order.append(turn)
                turn.respond(message.refusal, True)
            while self._is_full():
                await self._wait_for_room()

    def _count(self) -> None:
        """Count the held bytes in the memory budget, because a large message was added or removed."""
        self._is_counted = True
        self._inference.budget.set(self, self._held_bytes)

    def release(self) -> None:
        """Count nothing more: the call is over."""
        if self._is_counted:
            self._inference.budget.set(self, 0)

    def shed(self) -> None:
        """Its connection ends instead."""

    async def _wait_for_room(self) -> None:
        self._has_room.clear()
        await self._has_room.wait()

    def _is_full(self) -> bool:
        """True if no more requests should be started."""
        in_flight, streams = len(self._open), max(1, self._context.streams)
        limit_bytes = min(self._limit_bytes, self._limit_together // streams)
        return (
            in_flight >= max(1, min(IN_FLIGHT, IN_FLIGHT_TOGETHER // streams))
            or len(self._ready) >= UNSENT
            or (in_flight > 0 and self._held_bytes + in_flight * self._largest_bytes >= limit_bytes)
        )

    def half_close(self, reader: asyncio.Task[None]) -> None:
        """Note that no more requests follow: ``reader`` is done."""
        self._is_read = True
        if not reader.cancelled():
            self._failure = reader.exception()
        self._changed.set()

    def answer(self, turn: _Turn, answer: Answer, final: bool) -> None:
        """Queue ``answer`` behind those that must be sent before it."""
        turn.is_answered = final
        size = _size(answer)
        self._held_bytes += size
        if size > COUNTED_BYTES:
            self._count()
        self._largest_bytes = max(self._largest_bytes, size)
        if not turn.is_ordered:
            self._ready.append((turn, answer, final))
        else:
            turn.answers.append((answer, final))
            self._release()
        self._changed.set()

    async def write(self, send: Send) -> None:
        """Send the answers, until the requests have ended and all are answered."""
        while True:
            while self._ready:
                turn, answer, final = self._ready.popleft()
                try:
                    body = self._encode(turn, answer, final, LARGE_BYTES)
                except TooLargeForLoop:
                    body = await self._encode_large(turn, answer, final)
                if body is not None:
                    await send(body)
                self._held_bytes -= (size := _size(answer))
                if size > COUNTED_BYTES:
                    self._count()
                self._has_room.set()
                if final:
                    self._close(turn)
                elif turn.ticket is not None and not turn.is_ordered:
                    turn.ticket.read()
            # A server that stops takes no more requests, and answers the ones that it has.
            if self._failure is not None and not (self._open and isinstance(self._failure, Unavailable)):
                raise self._failure
            if self._is_read and not self._open:
                return
            self._changed.clear()
            await self._changed.wait()

    def cancel(self) -> None:
        """Cancel everything: the caller has disconnected."""
        for turn in tuple(self._open):
            turn.is_over, ticket = True, turn.ticket
            if ticket is not None:
                turn.ticket = None
                ticket.cancel()
        # Requests refer to their stream. Freed here, not by a garbage collection.
        self._open.clear()
        self._in_order.clear()
        self._ready.clear()

    def end(self, reason: Unavailable) -> None:
        """Answer the requests of decoupled models with ``reason``, because their last response may never come."""
        for turn in tuple(self._open):
            ticket = turn.ticket
            if ticket is not None and not turn.is_ordered and not turn.is_answered:
                self.answer(turn, reason, True)
                turn.is_over = True
                ticket.cancel()

    async def _start(self, turn: _Turn, raw_request: ReadMessage) -> None:
        self._open.add(turn)
        self._held_bytes += turn.size_bytes
        if turn.size_bytes > COUNTED_BYTES:
            self._count()
        try:
            try:
                self._submit(turn, raw_request)
            except TooLargeForLoop:
                await self._submit_large(turn, raw_request)
            turn.is_queued = True
        except HeadraceError as error:
            turn.respond(error.with_traceback(None), True)  # it would keep this frame until it is sent
        except Exception:
            log.exception("a request on a gRPC stream failed")
            turn.respond(InternalError("internal error; the server's log has the details"), True)

    def _submit(self, turn: _Turn, raw_request: ReadMessage) -> None:
        message, submitter = raw_request.message, self._inference.any_number
        try:
            if self._context.draining:
                raise Unavailable(SHUTTING_DOWN)
            turn.view = view = submitter.find(message.model_name, message.model_version)
        finally:
            if turn.is_ordered:
                self._in_order.append(turn)
        decoded = self._inference.decode(raw_request)
        submitter.start(view, turn.take(decoded), turn)

    async def _submit_large(self, turn: _Turn, raw_request: ReadMessage) -> None:
        """Let a thread decode a large request; the requests behind it wait."""
        inference = self._inference
        assert turn.view is not None
        read = partial(decode_large, inference, turn.view, raw_request)
        decoded = await inference.off_loop_work.run(read, log_id(turn.message.id))
        turn.view = inference.any_number.submit(turn.take(decoded), turn.caller)

    def _release(self) -> None:
        """Move the answers of the first turns to the send queue."""
        in_order = self._in_order
        while in_order:
            turn = in_order[0]
            self._ready.extend((turn, answer, final) for answer, final in turn.answers)
            turn.answers.clear()
            if not turn.is_answered:
                return
            in_order.popleft()

    async def _encode_large(self, turn: _Turn, answer: Answer, final: bool) -> bytes | None:
        """`_encode` on a thread. If there is no room, the error is the answer."""
        encode = partial(self._encode, turn, answer, final, UNBOUNDED)
        try:
            return await self._inference.off_loop_work.run(encode, log_id(turn.message.id))
        except Unavailable as error:
            return self._encode_error(turn, error, final)

    def _encode(self, turn: _Turn, answer: Answer, final: bool, loop_limit_bytes: int) -> bytes | None:
        if isinstance(answer, HeadraceError):
            return self._encode_error(turn, answer, final)
        try:
            return turn.encode(answer, final, loop_limit_bytes)
        except HeadraceError as error:
            return self._encode_error(turn, error, final)
        except TooLargeForLoop:
            raise
        except Exception:
            log.exception("a response on a gRPC stream could not be encoded")
            internal = InternalError("internal error; the server's log has the details")
        return self._encode_error(turn, internal, final)

    def _encode_error(self, turn: _Turn, reason: HeadraceError, final: bool) -> bytes:
        asked = turn.message
        log_failure(Failure.of(reason), "Infer", asked.model_name, asked.model_version, asked.id)
        if self._errors_end and turn.is_queued:
            raise reason
        return turn.encode_error(reason, final)

    def _close(self, turn: _Turn) -> None:
        self._open.discard(turn)
        turn.ticket = None  # it refers to this object: neither waits for a garbage collection
        self._held_bytes -= turn.size_bytes
        if turn.size_bytes > COUNTED_BYTES:
            self._count()
        self._has_room.set()


def _size(answer: Answer) -> int:
    """Return the bytes that ``answer`` holds while it waits."""
    return sum(tensor.nbytes for tensor in answer.outputs.values()) if isinstance(answer, InferResponse) else 0
