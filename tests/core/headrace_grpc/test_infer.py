"""The inference RPCs in memory: a scripted server, no transport (docs/spec/behaviours.md sections 2.3 to 2.6)."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as triton

from headrace import off_loop
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.options import ServerOptions
from headrace.engine import Caller, Engine, RequestSubmitter
from headrace.errors import BackendError, Code, HeadraceError, NotFound, Unavailable
from headrace.frontends.header_forwarding import ForwardedHeaders
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Ticket
from headrace.models.interceptors import InterceptorChain, make_interceptors
from headrace.models.open_streams import OpenStreams
from headrace.off_loop import OffLoopWork
from headrace_grpc import stream_infer
from headrace_grpc.infer import Inference, model_infer
from headrace_grpc.rpc import Metadata, only, texts
from headrace_grpc.stream_infer import model_stream_infer
from headrace_grpc.wire import RawRequest, unpack

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."


def asynchronous(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs ``test`` on a loop of its own, for no longer than a test may take."""

    @wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    return run


@dataclass
class StandIn:
    """A model: what handlers read of a ModelView."""

    name: str
    version: int = 1
    decoupled: bool = False
    max_batch_size: int = 0
    labels: dict[str, list[str]] = field(default_factory=dict)
    config: ModelConfig = field(default_factory=ModelConfig)
    enqueue: Any = None

    def check(self, ticket: Ticket) -> None:
        """Takes all."""


class StandInEngine:
    """A server with two models, which answers when the test calls it."""

    def __init__(self) -> None:
        self.models = {name: StandIn(name, decoupled=name == "d", enqueue=self.enqueue) for name in "md"}
        self.submitted: asyncio.Queue[Ticket] = asyncio.Queue()
        self.refusal: Exception | None = None
        self.off_loop_work, self.streams, self.collect = OffLoopWork(), OpenStreams(), tuple
        self.options = ServerOptions(model_repository=("models",))
        self.admission: InterceptorChain | None = None

    def resolve(self, name: str, version: str = "") -> StandIn:
        if name not in self.models:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return self.models[name]

    def submitter(self, single: Any = None, describe: Any = None) -> RequestSubmitter:
        return RequestSubmitter(cast("Any", self.resolve), single, describe, self.admission)

    def additions(self, kind: type[Any]) -> list[Any]:
        return []

    def enqueue(self, ticket: Ticket) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.put_nowait(ticket)

    def inference(self, pattern: str = "") -> Inference:
        self.admission = make_interceptors((ForwardedHeaders,), ServerOptions(grpc_header_forward_pattern=pattern))
        return Inference(cast("Engine", self))


@dataclass
class Call:
    """A context."""

    metadata: Metadata = ()
    draining: bool = False
    has_left: bool = False
    streams: int = 1
    peer: str = "127.0.0.1"
    certificate: None = None
    deadline_ns: int = 0

    def only(self, name: bytes) -> str | None:
        return only(self.metadata, name)

    @property
    def caller(self) -> Caller:
        return Caller("grpc", self.peer, headers=lambda: texts(self.metadata))


def raw_request(model: str = "m", id: str = "", **parameters: bool) -> RawRequest:
    message = triton.ModelInferRequest(model_name=model, id=id, raw_input_contents=[b"\0\0\0\0"])
    message.inputs.add(name="x", datatype="FP32", shape=[1])
    for key, value in parameters.items():
        message.parameters[key].bool_param = value
    return unpack(message.SerializeToString())


async def infer(inference: Inference, sent: RawRequest, context: Call) -> bytes:
    """Return the answer of `model_infer`. A cancellation is that of a caller that disconnects."""
    answered: asyncio.Future[bytes | HeadraceError] = asyncio.get_running_loop().create_future()

    def reply(answer: bytes | HeadraceError) -> None:
        if not answered.cancelled():
            answered.set_result(answer)

    cancel = model_infer(inference, sent, context, reply)
    try:
        found = await answered
    except asyncio.CancelledError:
        cancel()
        raise
    if isinstance(found, HeadraceError):
        raise found
    return found


def answer(value: float) -> InferResponse:
    return InferResponse({"y": np.array([value], np.float32)}, model_name="core's", model_version="3", id="core's")


# ------------------------------------------------------------------ unary


@asynchronous
async def test_the_answer_comes_back_whole() -> None:
    engine = StandInEngine()
    call = asyncio.ensure_future(infer(engine.inference(), raw_request(id="7"), Call()))
    ticket = await engine.submitted.get()
    assert ticket.request.id == "7"
    ticket.respond(answer(2), True)
    message = triton.ModelInferResponse.FromString(await call)
    assert (message.model_version, message.raw_output_contents[0]) == ("3", np.float32(2).tobytes())
    assert "triton_final_response" not in message.parameters


async def refused(engine: StandInEngine, sent: RawRequest, context: Call | None = None) -> tuple[Code, str]:
    with pytest.raises(HeadraceError) as caught:
        await infer(engine.inference(), sent, context or Call())
    return caught.value.code, caught.value.message


@asynchronous
async def test_refusals_come_with_their_code_and_text() -> None:
    engine = StandInEngine()
    unknown = "Request for unknown model: 'z' is not found"
    assert await refused(engine, raw_request("z")) == (Code.NOT_FOUND, unknown)
    decoupled = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    assert await refused(engine, raw_request("d")) == (Code.UNSUPPORTED, decoupled)
    assert await refused(engine, raw_request(), Call(draining=True)) == (Code.UNAVAILABLE, SHUTTING_DOWN)
    engine.refusal = Unavailable("full")
    assert await refused(engine, raw_request()) == (Code.UNAVAILABLE, "full")


@asynchronous
async def test_an_error_answer_is_raised() -> None:
    engine = StandInEngine()
    call = asyncio.ensure_future(refused(engine, raw_request()))
    (await engine.submitted.get()).respond(BackendError("broken"), True)
    assert await call == (Code.INTERNAL, "broken")


@pytest.mark.parametrize("count", [0, 2])
def test_any_number_of_answers_but_one_is_an_error(count: int) -> None:
    @asynchronous
    async def check() -> None:
        engine = StandInEngine()
        call = asyncio.ensure_future(refused(engine, raw_request()))
        ticket = await engine.submitted.get()
        for value in range(count):
            ticket.respond(answer(value), False)
        ticket.respond(None, True)
        assert await call == (Code.INTERNAL, f"expected a single response, got {count}")

    check()


@asynchronous
async def test_cancelling_the_call_cancels_the_request() -> None:
    engine = StandInEngine()
    call = asyncio.ensure_future(infer(engine.inference(), raw_request(), Call()))
    ticket = await engine.submitted.get()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ticket.cancelled
    ticket.respond(answer(1), True)  # a batch in flight still answers: this has no effect


@asynchronous
async def test_metadata_that_matches_becomes_parameters() -> None:
    engine = StandInEngine()
    metadata = (("my-key", "v"), ("my-bin", b"\0"), ("other", "w"))
    call = asyncio.ensure_future(infer(engine.inference("^MY-"), raw_request(), Call(metadata)))
    ticket = await engine.submitted.get()
    assert ticket.request.parameters == {"my-key": "v"}
    ticket.respond(answer(1), True)
    await call


@asynchronous
async def test_reserved_metadata_is_refused() -> None:
    with pytest.raises(HeadraceError, match="Header 'priority' is reserved for Triton usage and cannot be forwarded"):
        await infer(StandInEngine().inference("."), raw_request(), Call((("priority", "1"),)))


# ------------------------------------------------------------------ stream


class OpenStream:
    """A stream in progress: the messages that the client sends and receives."""

    def __init__(self, engine: StandInEngine, context: Call | None = None) -> None:
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self.context = context or Call()
        self.window = asyncio.Event()
        self.window.set()
        self._sent: asyncio.Queue[RawRequest | None] = asyncio.Queue()
        self.task = asyncio.ensure_future(
            model_stream_infer(engine.inference(), self._requests(), self._write, self.context)
        )

    def send(self, *raw_requests: RawRequest | None) -> None:
        """None half-closes."""
        for sent in raw_requests:
            self._sent.put_nowait(sent)

    async def _requests(self) -> AsyncIterator[RawRequest]:
        while (sent := await self._sent.get()) is not None:
            yield sent

    async def _write(self, body: bytes) -> None:
        await self.window.wait()
        self.received.put_nowait(triton.ModelStreamInferResponse.FromString(body))

    async def values(self, count: int) -> list[float]:
        messages = [await self.received.get() for _ in range(count)]
        return [np.frombuffer(m.infer_response.raw_output_contents[0], np.float32)[0] for m in messages]

    @property
    def unread(self) -> int:
        return self._sent.qsize()


@asynchronous
async def test_answers_leave_in_the_order_of_requests() -> None:
    engine = StandInEngine()
    opened = OpenStream(engine)
    opened.send(raw_request(), raw_request(), raw_request("z"), raw_request(), None)
    first, second, third = [await engine.submitted.get() for _ in range(3)]
    third.respond(answer(3), True)
    second.respond(answer(2), True)
    await asyncio.sleep(0)
    assert opened.received.empty()
    first.respond(answer(1), True)
    assert await opened.values(2) == [1, 2]
    assert (await opened.received.get()).error_message == "Request for unknown model: 'z' is not found"
    assert await opened.values(1) == [3]
    await opened.task


@asynchronous
async def test_decoupled_answers_leave_as_they_come() -> None:
    engine = StandInEngine()
    opened = OpenStream(engine)
    opened.send(raw_request("m"), raw_request("d"), raw_request("d"), None)
    plain, one, other = [await engine.submitted.get() for _ in range(3)]
    other.respond(answer(1), False)
    one.respond(answer(2), False)
    other.respond(answer(3), True)
    one.respond(None, True)
    assert await opened.values(3) == [1, 2, 3]
    assert not opened.task.done()
    plain.respond(answer(4), True)
    assert await opened.values(1) == [4]
    await opened.task
    assert opened.received.empty()


@asynchronous
async def test_every_response_says_whether_it_is_final() -> None:
    engine = StandInEngine()
    opened = OpenStream(engine)
    opened.send(raw_request("d"), raw_request("m"), None)
    decoupled, plain = [await engine.submitted.get() for _ in range(2)]
    decoupled.respond(answer(1), False)
    decoupled.respond(answer(2), True)
    plain.respond(answer(3), True)
    messages = [await opened.received.get() for _ in range(3)]
    finals = [message.infer_response.parameters["triton_final_response"].bool_param for message in messages]
    assert finals == [False, True, True]
    await opened.task


@asynchronous
async def test_an_empty_final_response_is_sent_to_those_who_ask() -> None:
    engine = StandInEngine()
    opened = OpenStream(engine)
    opened.send(raw_request("d", "7", triton_enable_empty_final_response=True), None)
    (await engine.submitted.get()).respond(None, True)
    await opened.task
    expected = triton.ModelStreamInferResponse(
        infer_response=triton.ModelInferResponse(model_name="d", id="7")  # the request's, which had no version
    )
    expected.infer_response.parameters["triton_final_response"].bool_param = True
    assert opened.received.get_nowait() == expected
    assert opened.received.empty()


@asynchronous
async def test_errors_do_not_end_the_stream() -> None:
    engine = StandInEngine()
    opened = OpenStream(engine)
    engine.refusal = Unavailable("full")
    opened.send(raw_request(id="1"))
    assert await opened.received.get() == triton.ModelStreamInferResponse(
        error_message="full", infer_response=triton.ModelInferResponse(id="1")
    )
    engine.refusal = None
    opened.send(raw_request(id="2"))
    (await engine.submitted.get()).respond(BackendError("broken"), True)
    expected = triton.ModelStreamInferResponse(
        error_message="broken", infer_response=triton.ModelInferResponse(model_name="m", id="2")
    )
    expected.infer_response.parameters["triton_final_response"].bool_param = True
    assert await opened.received.get() == expected
    opened.send(raw_request(), None)
    (await engine.submitted.get()).respond(answer(5), True)
    assert await opened.values(1) == [5]
    await opened.task


@asynchronous
async def test_triton_grpc_error_ends_the_stream_at_a_models_error() -> None:
    engine = StandInEngine()
    opened = OpenStream(engine, Call((("triton_grpc_error", "true"),)))
    opened.send(raw_request("z"), raw_request(), raw_request())
    assert (await opened.received.get()).error_message  # refused before it was queued: only a message
    failing, dropped = [await engine.submitted.get() for _ in range(2)]
    failing.respond(BackendError("broken"), True)
    with pytest.raises(BackendError, match="broken"):
        await opened.task
    assert dropped.cancelled
    assert opened.received.empty()


@asynchronous
async def test_a_response_that_cannot_be_encoded_is_that_requests_error() -> None:
    engine = StandInEngine()
    opened = OpenStream(engine)
    opened.send(raw_request(), raw_request(), None)
    bad, good = [await engine.submitted.get() for _ in range(2)]
    bad.respond(InferResponse({}, {"p": cast("Any", object())}), True)
    good.respond(answer(1), True)
    assert "response parameter 'p' can not be sent" in (await opened.received.get()).error_message
    assert await opened.values(1) == [1]
    await opened.task


def classified(id: str, *, strings: int = 0) -> RawRequest:
    """Return a request for a class of ``y``, with this many bytes of strings."""
    message = triton.ModelInferRequest(model_name="m", id=id, raw_input_contents=[bytes(max(4, strings))])
    message.inputs.add(name="x", datatype="BYTES" if strings else "FP32", shape=[max(4, strings) // 4])
    message.outputs.add(name="y").parameters["classification"].int64_param = 1
    return unpack(message.SerializeToString())


@asynchronous
async def test_large_request_on_a_full_server_is_refused_by_its_id_and_the_stream_continues() -> None:
    engine, waiting = StandInEngine(), off_loop.WAITING
    inference = engine.inference()
    text = "[request id: 7] 0 large requests and answers wait to be read or packed, try again later"
    off_loop.WAITING = 0
    try:
        opened = OpenStream(engine)
        opened.send(classified("7"))
        wide = InferResponse(
            {"y": np.zeros(off_loop.LARGE_BYTES, np.float32)}, model_name="m", model_version="1", id="7"
        )
        (await engine.submitted.get()).respond(wide, True)
        refused = [await opened.received.get()]
        opened.send(classified("7", strings=2 * off_loop.LARGE_BYTES))
        refused.append(await opened.received.get())
        assert [(message.error_message, message.infer_response.id) for message in refused] == [(text, "7")] * 2
        call = asyncio.ensure_future(infer(inference, classified("7"), Call()))
        (await engine.submitted.get()).respond(wide, True)
        for answered in (call, infer(inference, classified("7", strings=2 * off_loop.LARGE_BYTES), Call())):
            with pytest.raises(Unavailable) as refusal:
                await answered
            assert refusal.value.message == text
        opened.send(raw_request(), None)
        (await engine.submitted.get()).respond(answer(1), True)
        assert await opened.values(1) == [1]
        await opened.task
    finally:
        off_loop.WAITING = waiting


def test_a_bug_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    @asynchronous
    async def check() -> None:
        engine = StandInEngine()
        engine.refusal = ZeroDivisionError("secret")
        opened = OpenStream(engine)
        opened.send(raw_request(), None)
        message = await opened.received.get()
        assert message.error_message == "internal error; the server's log has the details"
        await opened.task

    with caplog.at_level(logging.ERROR):
        check()
    assert "secret" in caplog.text


@asynchronous
async def test_cancelling_the_stream_cancels_its_requests() -> None:
    engine = StandInEngine()
    opened = OpenStream(engine)
    opened.send(raw_request(), raw_request("d"))
    tickets = [await engine.submitted.get() for _ in range(2)]
    opened.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opened.task
    assert [ticket.cancelled for ticket in tickets] == [True, True]
    tickets[1].respond(answer(1), True)


@asynchronous
async def test_a_failing_write_cancels_what_is_in_flight() -> None:
    engine = StandInEngine()

    async def requests() -> AsyncIterator[RawRequest]:
        yield raw_request()
        yield raw_request()
        await asyncio.Event().wait()

    async def write(body: bytes) -> None:
        raise ConnectionResetError

    call = asyncio.ensure_future(model_stream_infer(engine.inference(), requests(), write, Call()))
    first, second = [await engine.submitted.get() for _ in range(2)]
    first.respond(answer(1), True)
    with pytest.raises(ConnectionResetError):
        await call
    assert second.cancelled


@asynchronous
async def test_the_reader_of_a_stream_that_ends_has_ended_too() -> None:
    """Its task is awaited until then, and the iterator that it reads can be closed."""
    engine = StandInEngine()

    async def requests() -> AsyncIterator[RawRequest]:
        yield raw_request()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)

    async def write(body: bytes) -> None:
        raise ConnectionResetError

    inference, reading = engine.inference(), requests()
    call = asyncio.ensure_future(model_stream_infer(inference, reading, write, Call()))
    (await engine.submitted.get()).respond(answer(1), True)
    with pytest.raises(ConnectionResetError):
        await call
    assert not inference.readers
    await cast("AsyncGenerator[RawRequest, None]", reading).aclose()


def held() -> int:
    """Requests that anybody still holds, or that wait for the collector, which does not run in these tests."""
    return sum(type(each) is RawRequest for each in gc.get_objects())


@asynchronous
async def test_a_refusal_that_waits_to_be_sent_keeps_nothing_but_its_text() -> None:
    opened, before = OpenStream(StandInEngine()), held()
    opened.window.clear()
    opened.send(*(raw_request("z") for _ in range(50)))
    while opened.unread:
        await asyncio.sleep(0)
    refusals = [each for each in gc.get_objects() if type(each) is NotFound]
    assert len(refusals) == 50
    assert [each.__traceback__ for each in refusals] == [None] * 50
    refusals.clear()
    opened.window.set()
    opened.send(None)
    await opened.task
    assert held() == before


@pytest.mark.parametrize("model", ["m", "z"])
def test_a_stream_that_is_left_is_freed_at_once(model: str) -> None:
    @asynchronous
    async def leave() -> None:
        engine = StandInEngine()
        opened = OpenStream(engine)
        opened.window.clear()
        opened.send(*(raw_request(model) for _ in range(50)))
        while opened.unread:
            await asyncio.sleep(0)
        opened.task.cancel()
        await asyncio.wait([opened.task])

    before = held()
    leave()
    assert held() <= before + 1  # the cancelled task shows in its traceback where it was


@asynchronous
async def test_a_failing_read_ends_the_stream() -> None:
    class Broken:
        def __aiter__(self) -> Broken:
            return self

        async def __anext__(self) -> RawRequest:
            raise ConnectionResetError

    async def write(body: bytes) -> None:
        """Nothing is written."""

    with pytest.raises(ConnectionResetError):
        await model_stream_infer(StandInEngine().inference(), Broken(), write, Call())


@asynchronous
async def test_draining_refuses_new_requests_and_answers_old_ones() -> None:
    engine = StandInEngine()
    opened = OpenStream(engine)
    opened.send(raw_request())
    old = await engine.submitted.get()
    opened.context.draining = True
    opened.send(raw_request(), None)
    old.respond(answer(1), True)
    assert await opened.values(1) == [1]
    assert (await opened.received.get()).error_message == SHUTTING_DOWN
    await opened.task


@asynchronous
async def test_a_client_that_does_not_read_is_not_read_either() -> None:
    engine = StandInEngine()
    opened = OpenStream(engine)
    opened.window.clear()
    extra = 3
    opened.send(*[raw_request() for _ in range(stream_infer.IN_FLIGHT + extra)], None)
    in_flight = [await engine.submitted.get() for _ in range(stream_infer.IN_FLIGHT)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.submitted.empty()
    assert opened.unread == extra + 1
    for value, ticket in enumerate(in_flight):
        ticket.respond(answer(value), True)
    for _ in range(10):
        await asyncio.sleep(0)
    assert opened.unread == extra + 1
    opened.window.set()
    for value in range(extra):
        (await engine.submitted.get()).respond(answer(stream_infer.IN_FLIGHT + value), True)
    assert await opened.values(stream_infer.IN_FLIGHT + extra) == list(range(stream_infer.IN_FLIGHT + extra))
    await opened.task


@asynchronous
async def test_streams_of_one_connection_share_what_it_may_have_in_flight() -> None:
    for streams, begun in ((1, 1024), (8, 1024), (64, 128), (10_000, 1)):
        await _expect_in_flight(streams, begun)


async def _expect_in_flight(streams: int, begun: int) -> None:
    engine = StandInEngine()
    opened = OpenStream(engine, Call(streams=streams))
    opened.send(*[raw_request() for _ in range(1100)], None)
    for _ in range(begun):
        await engine.submitted.get()
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.submitted.empty()
    opened.task.cancel()


@asynchronous
async def test_streams_of_one_connection_share_what_it_may_leave_unread() -> None:
    """Each of 1024 streams may hold 10,000 bytes of requests and answers, and one request of any size."""
    engine = StandInEngine()
    engine.options = ServerOptions(model_repository=("models",), grpc_max_unread_size=10_000 * 1024)
    opened = OpenStream(engine, Call(streams=1024))
    opened.send(*[raw_request(id="x" * 8_000) for _ in range(7)], None)
    for _ in range(2):
        await engine.submitted.get()
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.submitted.empty()
    opened.task.cancel()


@asynchronous
async def test_a_client_that_does_not_read_its_refusals_is_not_read_either() -> None:
    opened, extra = OpenStream(StandInEngine()), 30
    opened.window.clear()
    opened.send(*(raw_request("z") for _ in range(stream_infer.UNSENT + extra)), None)
    for _ in range(stream_infer.UNSENT + extra):
        await asyncio.sleep(0)
    assert opened.unread in (extra, extra + 1)  # one more waits in the writer's hands
    opened.window.set()
    await opened.task
    assert opened.received.qsize() == stream_infer.UNSENT + extra
