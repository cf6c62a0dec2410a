"""Admission of gRPC calls: runs between a host and the handlers, on a server with interceptors.

A call is admitted before its message is parsed. Only the name of the model is read from the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from headrace.engine import Caller, InterceptorChain, Operation
from headrace.errors import CallerError, Cancelled, Code, HeadraceError, InvalidArgument, plugin_failure
from headrace.frontends.failures import Failure, is_verbose, log_failure
from headrace.off_loop import OffLoopWork, TooLargeForLoop
from headrace_grpc.grpc_service_pb2 import ModelInferRequest
from headrace_grpc.large_requests import unpack_large
from headrace_grpc.rpc import (
    Answer,
    Cancel,
    Context,
    Direct,
    Metadata,
    Reply,
    Rpc,
    Send,
    Stream,
    Unary,
    awaited,
    caller_of,
    first,
    serialize,
)
from headrace_grpc.usual_messages import ReadMessage, unpack
from headrace_grpc.wire import FIXED_SIZES, LENGTH_DELIMITED, Buffer, RawRequest, read_varint

#: The model's name is searched in at most 64 fields of a message. Clients write it first.
_MOST_FIELDS = 64
_MODEL_FIELD, _ID_FIELD = 1, 3


class AdmittedContext:
    """The context of an admitted call, with its caller."""

    __slots__ = ("_context", "caller")

    def __init__(self, context: Context, caller: Caller) -> None:
        self._context, self.caller = context, caller

    @property
    def metadata(self) -> Metadata:
        return self._context.metadata

    def only(self, name: bytes) -> str | None:
        return self._context.only(name)

    @property
    def deadline_ns(self) -> int:
        return self._context.deadline_ns

    @property
    def peer(self) -> str:
        return self._context.peer

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        return self._context.certificate

    @property
    def has_left(self) -> bool:
        return self._context.has_left

    @property
    def draining(self) -> bool:
        return self._context.draining

    @property
    def streams(self) -> int:
        return self._context.streams


def admitted(rpc: Rpc, admission: InterceptorChain, large: OffLoopWork) -> Rpc:
    """Return ``rpc`` with admission: every call is admitted before its message is parsed."""
    guard = _Guard(rpc, admission, large)
    if rpc.direct is not None:
        return replace(rpc, parse=_unparsed, parse_large=_unparsed, direct=guard.direct(rpc.direct))
    if rpc.unary is not None:
        return replace(rpc, parse=_unparsed, parse_large=_unparsed, unary=guard.unary(rpc.unary))
    assert rpc.stream is not None
    return replace(rpc, parse=_unparsed, parse_large=_unparsed, stream=guard.stream(rpc.stream))


def _unparsed(body: Buffer) -> Buffer:
    return body


class _Guard:
    """Admits the calls of ``rpc``, then parses their messages."""

    def __init__(self, rpc: Rpc, admission: InterceptorChain, large: OffLoopWork) -> None:
        self._rpc, self._admission, self._large = rpc, admission, large
        #: Calls that wait. The event loop itself keeps no reference to tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ calls with one message

    def unary(self, handler: Unary) -> Unary:
        async def call(body: Buffer, context: Context) -> Answer:
            caller = caller_of(context)
            return await self._call(handler, body, AdmittedContext(context, caller), self._admit(caller, body))

        return call

    def direct(self, handler: Direct) -> Direct:
        as_unary, parse = awaited(handler), self._rpc.parse
        unadmitted = self._rpc.unadmitted

        def admit(chain: InterceptorChain, body: Buffer, context: Context, reply: Reply) -> Cancel | None:
            caller = caller_of(context)
            admitted = AdmittedContext(context, caller)
            waiting = self._admit(caller, body, chain)
            if waiting is None:
                try:
                    return self._begin(handler, self._rpc.parse(body), admitted, reply)
                except TooLargeForLoop:
                    pass
                except Exception as error:
                    caller.end(_worded(error))
                    raise
            return self._start(self._answer(as_unary, body, admitted, waiting, reply))

        if unadmitted is None:
            return partial(admit, self._admission)

        def skip(body: Buffer, context: Context, reply: Reply) -> Cancel | None:
            try:
                return unadmitted(parse(body), context, reply)
            except TooLargeForLoop:
                return self._start(self._answer_skipped(awaited(unadmitted), body, context, reply))

        return self._admission.select(admit, skip, self._rpc.recorded, _trace_context, _model_name, self._rpc.permitted)

    def _start(self, answering: Coroutine[Any, Any, None]) -> Cancel:
        """Run ``answering`` as a task. Return a function that cancels it when it has started."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(answering)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return partial(loop.call_soon, task.cancel)

    async def _answer_skipped(self, handler: Unary, body: Buffer, context: Context, reply: Reply) -> None:
        """Answer a direct call that no interceptor admits, and whose message is parsed on a thread."""
        try:
            request = await _read(body, self._rpc.parse, self._rpc.parse_large, self._large)
            answer: bytes | HeadraceError = serialize(await handler(request, context))
        except Exception as error:
            answer = _worded(error).with_traceback(None)
        reply(answer)

    def _begin(self, handler: Direct, request: Any, context: AdmittedContext, reply: Reply) -> Cancel:
        """Let ``handler`` answer now or later. The operation ends with its answer, or when the caller disconnects."""
        self._require_name(request, context.caller)
        context.caller.ends_with_reply = True

        def answer(answer: bytes | HeadraceError) -> None:
            context.caller.end(answer if isinstance(answer, HeadraceError) else None)
            reply(answer)
            if context.caller.on_sent is not None:
                context.caller.on_sent()

        cancel = handler(request, context, answer)

        def leave() -> None:
            if cancel is not None:
                cancel()
            context.caller.end(_left())

        return leave

    async def _answer(
        self,
        handler: Unary,
        body: Buffer,
        context: AdmittedContext,
        waiting: Coroutine[Any, Any, None] | None,
        reply: Reply,
    ) -> None:
        """Answer a direct call that waits, or whose message is parsed on a thread."""
        try:
            answer: bytes | HeadraceError = serialize(await self._call(handler, body, context, waiting))
        except Exception as error:
            answer = _worded(error).with_traceback(None)
        reply(answer)
        if context.caller.on_sent is not None:
            context.caller.on_sent()

    async def _call(
        self, handler: Unary, body: Buffer, context: AdmittedContext, waiting: Coroutine[Any, Any, None] | None
    ) -> Answer:
        caller = context.caller
        try:
            if waiting is not None:
                await self._pass(waiting, context)
            request = await _read(body, self._rpc.parse, self._rpc.parse_large, self._large)
            self._require_name(request, caller)
            caller.ends_with_reply = True
            answer = await handler(request, context)
        except asyncio.CancelledError:
            caller.end(_left())
            raise
        except Exception as error:
            caller.end(_worded(error))
            raise
        caller.end()
        return answer

    # ------------------------------------------------------------------ streams

    def stream(self, handler: Stream) -> Stream:
        async def call(bodies: AsyncIterator[Buffer], send: Send, context: Context) -> None:
            caller = caller_of(context)
            # The messages of a stream of inferences are admitted one by one, before they are parsed.
            is_parsed = self._rpc.operation is not Operation.OPEN_STREAM
            try:
                admitted = AdmittedContext(context, caller)
                if (waiting := self._admit(caller, b"")) is not None:
                    await self._pass(waiting, admitted)
                await handler(self._parsed(bodies) if is_parsed else bodies, send, admitted)
            except asyncio.CancelledError:
                caller.end(_left())
                raise
            except Exception as error:
                caller.end(_worded(error))
                raise
            caller.end()

        return call

    async def _parsed(self, bodies: AsyncIterator[Buffer]) -> AsyncIterator[Any]:
        async for body in bodies:
            yield await _read(body, self._rpc.parse, self._rpc.parse_large, self._large)

    # ------------------------------------------------------------------ the model

    def _admit(
        self, caller: Caller, body: Buffer, chain: InterceptorChain | None = None
    ) -> Coroutine[Any, Any, None] | None:
        field, caller.body_bytes = self._rpc.model_field, len(body)
        try:
            name = "" if field is None else _text_in(body, field[0])
            return (chain or self._admission).admit(caller, self._rpc.operation, name)
        except HeadraceError as error:
            self._log_error(error, caller)
            raise

    async def _pass(self, waiting: Coroutine[Any, Any, None], context: AdmittedContext) -> None:
        try:
            await waiting
        except HeadraceError as error:
            self._log_error(error, context.caller)
            raise
        except BaseException as error:
            raise plugin_failure(error, context.has_left) from error

    def _log_error(self, error: HeadraceError, caller: Caller) -> None:
        """Write a refusal to the verbose log, because the handler does not get it."""
        if is_verbose():
            log_failure(Failure.of(error), self._rpc.name, caller.model)

    def _require_name(self, request: Any, caller: Caller) -> None:
        """Raise `InvalidArgument` if the message names another model than the one that was admitted."""
        if self._rpc.model_field is not None:
            named = getattr(getattr(request, "message", request), self._rpc.model_field[1])
            _require_same(named, caller)


# ---------------------------------------------------------------------- the messages of a stream of inferences


class AdmittedMessage(NamedTuple):
    """A message of a stream, and its caller; None if no interceptor admits it. A refused one has only the name of its
    model and its id."""

    request: ReadMessage
    caller: Caller | None
    refusal: HeadraceError | None = None


async def admit_messages(
    bodies: AsyncIterator[Any], context: Context, admission: InterceptorChain, large: OffLoopWork
) -> AsyncIterator[AdmittedMessage]:
    """Admit the inferences of a stream one by one, and parse the admitted ones."""
    opened = caller_of(context)
    chain_of = admission.select(lambda chain, *call: chain, lambda *call: None, None, _trace_context, _model_name)
    async for body in bodies:
        if (chain := chain_of(body, context, None)) is None:
            yield AdmittedMessage(await _read(body, unpack, unpack_large, large), None)
            continue
        caller, name = opened.for_another_operation(), _text_in(body, _MODEL_FIELD)
        caller.body_bytes = len(body)
        try:
            if (waiting := chain.admit(caller, Operation.INFER, name)) is not None:
                await waiting
        except HeadraceError as error:
            known = ModelInferRequest(model_name=name, id=_text_in(body, _ID_FIELD))
            yield AdmittedMessage(RawRequest(known, (), body), caller, error.with_traceback(None))
            continue
        except asyncio.CancelledError as error:
            caller.end(_left())
            raise plugin_failure(error, context.has_left) from error
        try:
            request = await _read(body, unpack, unpack_large, large)
            _require_same(request.message.model_name, caller)
        except Exception as error:
            caller.end(_worded(error))
            raise
        yield AdmittedMessage(request, caller)


# ---------------------------------------------------------------------- messages


async def _read(
    body: Buffer, parse: Callable[[Any], Any], parse_large: Callable[[Any], Any] | None, large: OffLoopWork
) -> Any:
    try:
        return parse(body)
    except TooLargeForLoop:
        return await large.run(partial(parse_large or parse, body))


def _trace_context(body: Buffer, context: Context) -> str:
    """Return the metadata that says which trace the request belongs to."""
    return first(context.metadata, "traceparent") or ""


def _model_name(body: Buffer, context: Context) -> str:
    return _text_in(body, _MODEL_FIELD)


def _text_in(body: Buffer, number: int) -> str:
    """Return the first field ``number`` of a message, a string; empty if it is not among the first 64 fields."""
    position = 0
    try:
        for _ in range(_MOST_FIELDS):
            if position >= len(body):
                break
            tag, position = read_varint(body, position)
            kind = tag & 7
            if kind == LENGTH_DELIMITED:
                size, position = read_varint(body, position)
                if tag >> 3 == number:
                    return str(body[position : position + size], "utf-8")
                position += size
            elif kind == 0:
                position = read_varint(body, position)[1]
            else:
                position += FIXED_SIZES[kind]
    except (IndexError, KeyError, ValueError):  # protobuf reports the error
        pass
    return ""


def _require_same(named: str, caller: Caller) -> None:
    if named != caller.model:
        raise InvalidArgument(
            f"the message names its model '{named}' behind its first {_MOST_FIELDS} fields or more than once, so that "
            "it can not be admitted"
        )


def _worded(error: Exception) -> HeadraceError:
    """Return the error for the caller."""
    if isinstance(error, HeadraceError):
        return error
    if isinstance(error, DecodeError):
        return CallerError("Unable to parse request", Code.INTERNAL)
    return CallerError("internal error; the server's log has the details", Code.INTERNAL)


def _left() -> Cancelled:
    return Cancelled("the caller has disconnected")
