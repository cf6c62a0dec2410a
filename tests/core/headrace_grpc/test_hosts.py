"""A host with RPCs of its own, driven by grpcio's client: a handler works the same on all hosts.

For the native host, and the hosts of plugins, whose tests import these.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from headrace.config.options import ServerOptions
from headrace.engine import Engine, ExtensionOperation, Operation
from headrace.errors import BackendError, Code, HeadraceError
from headrace.models.serving_table import ServingTable
from headrace_grpc.hosts import GrpcHost
from headrace_grpc.rpc import Cancel, Context, Reply, Rpc, Send

Host = type[GrpcHost]

MIB = 1 << 20
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
TRIAL = ExtensionOperation("trial", "")
NUMBERS = {
    Code.UNKNOWN: grpc.StatusCode.UNKNOWN, Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND, Code.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE, Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS, Code.CANCELLED: grpc.StatusCode.CANCELLED,
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Code.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Code.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
}  # fmt: skip


@dataclass
class TrialService:
    """Handlers, and what happened to them."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    metadata: Any = None
    draining: list[bool] = field(default_factory=list)
    cancels: int = 0
    sent: int = 0
    reply: Reply | None = None

    def table(self) -> list[Rpc]:
        unaries = (self.echo, self.fail, self.wait, self.look)
        streams = (self.repeat, self.pour, self.listen, self.end_early)
        directs = (self.now, self.later, self.refuse, self.answer_with_error)
        return [
            *(Rpc("test.TrialService", each.__name__, TRIAL, bytes, unary=each) for each in unaries),
            *(Rpc("test.TrialService", each.__name__, TRIAL, bytes, stream=each) for each in streams),
            *(Rpc("test.TrialService", each.__name__, TRIAL, bytes, direct=each) for each in directs),
            Rpc("test.TrialService", "unreadable", TRIAL, _unreadable, unary=self.echo),
            Rpc("test.TrialService", "packed", Operation.INFER, bytes, unary=self.echo),
        ]

    async def echo(self, request: bytes, context: Context) -> bytes:
        return request

    async def look(self, request: bytes, context: Context) -> bytes:
        self.metadata = context.metadata
        self.draining.append(context.draining)
        return b""

    async def fail(self, request: bytes, context: Context) -> bytes:
        assert self.error is not None
        raise self.error

    async def wait(self, request: bytes, context: Context) -> bytes:
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return request

    async def repeat(self, requests: AsyncIterator[bytes], send: Send, context: Context) -> None:
        async for request in requests:
            await send(request)
        if self.error is not None:
            raise self.error

    async def pour(self, requests: AsyncIterator[bytes], send: Send, context: Context) -> None:
        """A mebibyte after the other, as long as somebody takes them."""
        try:
            while True:
                await send(bytes(MIB))
                self.sent += 1
        finally:
            self.cancelled.set()

    async def listen(self, requests: AsyncIterator[bytes], send: Send, context: Context) -> None:
        """Grpcio ends the request iterator of a client that disconnects, the native host cancels the task."""
        try:
            async for _ in requests:
                self.begun.set()
        finally:
            self.cancelled.set()

    async def end_early(self, requests: AsyncIterator[bytes], send: Send, context: Context) -> None:
        """Without reading a word."""
        await send(b"enough")

    def now(self, request: bytes, context: Context, reply: Reply) -> Cancel | None:
        reply(request)
        return None

    def later(self, request: bytes, context: Context, reply: Reply) -> Cancel | None:
        self.reply = reply
        self.begun.set()

        def cancel() -> None:
            self.cancels += 1
            self.cancelled.set()
            reply(HeadraceError("left", Code.CANCELLED))

        return cancel

    def refuse(self, request: bytes, context: Context, reply: Reply) -> Cancel | None:
        assert self.error is not None
        raise self.error

    def answer_with_error(self, request: bytes, context: Context, reply: Reply) -> Cancel | None:
        assert isinstance(self.error, HeadraceError)
        reply(self.error)
        return None


def _unreadable(body: bytes) -> Any:
    raise DecodeError("secret")


@dataclass
class Served:
    service: TrialService
    host: GrpcHost
    port: int
    channel: grpc.aio.Channel

    def unary(self, name: str, body: bytes = b"", **how: Any) -> Any:
        return self.channel.unary_unary(f"/test.TrialService/{name}", None, None)(body, **how)

    def stream(self, name: str, requests: Any = None, **how: Any) -> Any:
        return self.channel.stream_stream(f"/test.TrialService/{name}", None, None)(requests, **how)

    async def stop(self) -> None:
        await self.host.stop()


UNBOUNDED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@asynccontextmanager
async def serving(host: Host, **options: Any) -> AsyncIterator[Served]:
    service = TrialService()
    server_options = ServerOptions(grpc_address="127.0.0.1", **{"grpc_port": 0, "exit_timeout_secs": 5, **options})
    running = host(Engine(server_options, ServingTable()))
    running.rpcs = service.table()
    await running.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}", UNBOUNDED) as channel:
        try:
            yield Served(service, running, running.port, channel)
        finally:
            await running.stop()


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs ``test`` on a loop of its own, for no longer than a test may take."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return run


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def soon(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def _refuses_connections(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return
        writer.close()
        await asyncio.sleep(0.01)


# ------------------------------------------------------------------------------ calls


@pytest.mark.parametrize("method", ["echo", "now"])
@pytest.mark.parametrize("size", [0, 1, 1000, 65_536, 300_000, 40 * MIB])
@asynchronous
async def test_a_message_goes_and_comes_back(host: Host, method: str, size: int) -> None:
    async with serving(host) as served:
        body = bytes(range(256)) * (size // 256) + bytes(size % 256)
        assert await served.unary(method, body) == body


@asynchronous
async def test_an_answer_may_come_later(host: Host) -> None:
    async with serving(host) as served:
        call = asyncio.ensure_future(served.unary("later"))
        await served.service.begun.wait()
        assert served.service.reply is not None
        served.service.reply(b"there")
        assert await call == b"there"
        assert served.service.cancels == 0


@asynchronous
async def test_a_call_behind_thousands_that_were_cancelled_is_answered(host: Host) -> None:
    """They arrive while the loop is busy; grpc's core by itself refuses any of this many as cancelled."""
    sent = threading.Event()

    def ask(port: int) -> bytes:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_unary("/test.TrialService/echo", None, None)
            for _ in range(40):
                for cancelled in [call.future(b"") for _ in range(100)]:
                    cancelled.cancel()
            innocent = call.future(b"innocent", timeout=25)
            with contextlib.suppress(grpc.FutureTimeoutError):
                innocent.result(0.5)  # the core's own threads have it by then, and would have refused it
            sent.set()
            answer: bytes = innocent.result()
            return answer

    async with serving(host) as served:
        asking = asyncio.ensure_future(asyncio.to_thread(ask, served.port))
        await asyncio.sleep(0)
        sent.wait(20)
        assert await asking == b"innocent"


TEXTS = ["plain", "100 %", "%41", "a\nb\tc", "näïve", "日本語 🚰", "x" * 6000, "'quoted' \"twice\"", " space "]


@pytest.mark.parametrize("method", ["fail", "refuse", "answer_with_error"])
@asynchronous
async def test_each_code_and_any_text_reach_the_client(host: Host, method: str) -> None:
    async with serving(host) as served:
        for code, status in NUMBERS.items():
            served.service.error = HeadraceError("because", code)
            assert await refusal(served.unary(method)) == (status, "because")
        for text in TEXTS:
            served.service.error = BackendError(text, Code.UNAVAILABLE)
            assert await refusal(served.unary(method)) == (grpc.StatusCode.UNAVAILABLE, text)


@pytest.mark.parametrize("method", ["fail", "refuse"])
@asynchronous
async def test_an_error_that_is_not_ours_is_logged_and_not_shown(
    host: Host, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(host) as served:
        served.service.error = ValueError("secret")
        text = "internal error; the server's log has the details"
        assert await refusal(served.unary(method)) == (grpc.StatusCode.INTERNAL, text)
    assert [record.exc_text or str(record.exc_info) for record in caplog.records if "secret" in caplog.text]
    assert "secret" in caplog.text


@asynchronous
async def test_a_request_that_can_not_be_read_is_refused_without_details(host: Host) -> None:
    async with serving(host) as served:
        assert await refusal(served.unary("unreadable")) == (grpc.StatusCode.INTERNAL, "Unable to parse request")


@pytest.mark.parametrize("path", ["/test.TrialService/nothing", "/test.Nobody/echo", "/echo", "/"])
@asynchronous
async def test_an_unknown_method_is_not_implemented(host: Host, path: str) -> None:
    async with serving(host) as served:
        call = served.channel.unary_unary(path, None, None)(b"")
        assert await refusal(call) == (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


@asynchronous
async def test_metadata_arrives_as_it_was_sent(host: Host) -> None:
    sent = (("x-one", "1"), ("x-two", "a"), ("x-two", "b, c"), ("x-bytes-bin", b"\x00\xff,="), ("x-bytes-bin", b""),
            ("x-empty", ""), ("x-long", "y" * 4000), ("x-symbols", "!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~"))  # fmt: skip
    async with serving(host) as served:
        await served.unary("look", metadata=sent)
        assert tuple(pair for pair in served.service.metadata if pair[0].startswith("x-")) == sent
        assert {key for key, _ in served.service.metadata} == {key for key, _ in sent} | {"user-agent"}
        assert served.service.draining == [False]


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("size", [1000, MIB])
@asynchronous
async def test_packed_requests_are_unpacked(host: Host, algorithm: grpc.Compression, size: int) -> None:
    async with serving(host) as served:
        assert await served.unary("echo", b"a" * size, compression=algorithm) == b"a" * size
        requests = iter([b"a" * size, b"b" * size])
        answers = served.stream("repeat", requests, compression=algorithm)
        assert [answer async for answer in answers] == [b"a" * size, b"b" * size]


@pytest.mark.parametrize("level", ["low", "medium", "high"])
@asynchronous
async def test_packed_answers_are_understood(host: Host, level: str) -> None:
    async with serving(host, grpc_infer_response_compression_level=level) as served:
        assert await served.unary("packed", b"a" * MIB) == b"a" * MIB


# ------------------------------------------------------------------------ clients that disconnect


@pytest.mark.parametrize("method", ["wait", "later"])
@asynchronous
async def test_a_deadline_ends_the_call_and_its_handler(host: Host, method: str) -> None:
    async with serving(host) as served:
        code, _ = await refusal(served.unary(method, timeout=0.2))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.service.cancelled.wait()
        assert served.service.cancels == (method == "later")


@pytest.mark.parametrize("method", ["wait", "later"])
@asynchronous
async def test_a_call_that_is_cancelled_ends_its_handler(host: Host, method: str) -> None:
    async with serving(host) as served:
        call = served.unary(method)
        await served.service.begun.wait()
        call.cancel()
        await served.service.cancelled.wait()
        assert served.service.cancels == (method == "later")
        assert await served.unary("echo", b"x") == b"x"


@pytest.mark.parametrize("method", ["wait", "later", "listen"])
@asynchronous
async def test_a_client_that_disconnects_ends_its_handlers(host: Host, method: str) -> None:
    async with serving(host) as served:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{served.port}")
        if method == "listen":
            stream: Any = channel.stream_stream("/test.TrialService/listen", None, None)
            stream = stream()
            await stream.write(b"x")
        else:
            unary = asyncio.ensure_future(refusal(channel.unary_unary(f"/test.TrialService/{method}", None, None)(b"")))
        await served.service.begun.wait()
        await channel.close(None)
        await served.service.cancelled.wait()
        if method != "listen":
            with contextlib.suppress(asyncio.CancelledError):
                await unary


@asynchronous
async def test_an_answer_after_the_client_left_is_lost_in_silence(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(host) as served:
        call = served.unary("later")
        await served.service.begun.wait()
        call.cancel()
        await served.service.cancelled.wait()
        assert served.service.reply is not None
        served.service.reply(b"too late")
        assert await served.unary("echo", b"x") == b"x"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


# --------------------------------------------------------------------------- streams


@asynchronous
async def test_a_stream_keeps_its_order(host: Host) -> None:
    async with serving(host) as served:
        sent = [str(number).encode() * (number % 300) for number in range(2000)]
        assert [answer async for answer in served.stream("repeat", iter(sent))] == sent


@asynchronous
async def test_a_stream_answers_while_it_is_asked(host: Host) -> None:
    async with serving(host) as served:
        stream = served.stream("repeat")
        for number in range(50):
            await stream.write(b"%d" % number)
            assert await stream.read() == b"%d" % number
        await stream.done_writing()
        assert await stream.read() is EOF
        assert await stream.code() is grpc.StatusCode.OK


@asynchronous
async def test_a_stream_may_carry_large_messages(host: Host) -> None:
    async with serving(host) as served:
        sent = [bytes([number]) * (5 * MIB) for number in range(5)]
        assert [answer async for answer in served.stream("repeat", iter(sent))] == sent


@asynchronous
async def test_an_error_follows_the_answers_before_it(host: Host) -> None:
    async with serving(host) as served:
        served.service.error = HeadraceError("at the end", Code.NOT_FOUND)
        stream = served.stream("repeat", iter([b"1", b"2"]))
        assert [await stream.read(), await stream.read()] == [b"1", b"2"]
        assert await refusal(stream.read()) == (grpc.StatusCode.NOT_FOUND, "at the end")


@asynchronous
async def test_a_stream_may_end_before_its_client_does(host: Host) -> None:
    async with serving(host) as served:
        stream = served.stream("end_early")
        assert await stream.read() == b"enough"
        assert await stream.read() is EOF
        assert await stream.code() is grpc.StatusCode.OK


@asynchronous
async def test_a_client_that_does_not_read_stops_the_handler(host: Host) -> None:
    async with serving(host) as served:
        stream = served.stream("pour")
        assert len(await stream.read()) == MIB
        sent = -1
        while sent != served.service.sent:
            sent = served.service.sent
            await asyncio.sleep(0.3)
        assert sent < 64
        for _ in range(sent):
            await stream.read()
        await soon(lambda: served.service.sent > sent)
        stream.cancel()
        await served.service.cancelled.wait()


@asynchronous
async def test_a_deadline_ends_a_stream(host: Host) -> None:
    async with serving(host) as served:
        stream = served.stream("listen", timeout=0.3)
        await stream.write(b"x")
        assert await stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.service.cancelled.wait()


# ------------------------------------------------------------------------------- stop


@asynchronous
async def test_a_client_that_reads_slowly_keeps_its_stream_when_the_server_stops(host: Host) -> None:
    """It reads for longer than the 1.5 s that callers have to read a whole answer."""
    async with serving(host, exit_timeout_secs=6) as served:
        stream = served.stream("pour")
        await stream.read()
        stop = asyncio.ensure_future(served.stop())
        ends = asyncio.get_running_loop().time() + 2
        while asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(0.02)
            assert len(await stream.read()) == MIB
        stream.cancel()
        await stop


@pytest.mark.parametrize("method", ["wait", "later"])
@asynchronous
async def test_stopping_answers_what_is_in_flight_and_takes_no_more(host: Host, method: str) -> None:
    async with serving(host, exit_timeout_secs=60) as served:
        call = asyncio.ensure_future(served.unary(method, b"x"))
        await served.service.begun.wait()
        stop = asyncio.ensure_future(served.stop())
        await _refuses_connections(served.port)  # grpc's core may lose one that arrives while it closes the port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as late:
            code, _ = await refusal(late.unary_unary("/test.TrialService/echo", None, None)(b""))
            assert code is grpc.StatusCode.UNAVAILABLE
        assert not stop.done()
        served.service.go_on.set()
        if served.service.reply is not None:
            served.service.reply(b"x")
        assert await call == b"x"
        await asyncio.wait_for(stop, 30)


@asynchronous
async def test_stopping_without_calls_takes_no_time(host: Host) -> None:
    async with serving(host) as served:
        assert await served.unary("echo", b"x") == b"x"
        await asyncio.wait_for(served.stop(), 2)


@pytest.mark.parametrize("method", ["wait", "later"])
@asynchronous
async def test_stopping_aborts_what_is_left_in_the_end(host: Host, method: str) -> None:
    async with serving(host, exit_timeout_secs=1) as served:
        call = asyncio.ensure_future(refusal(served.unary(method)))
        await served.service.begun.wait()
        await asyncio.wait_for(served.stop(), 3)
        await asyncio.wait_for(served.service.cancelled.wait(), 2)
        assert (await call)[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@asynchronous
async def test_a_stop_that_is_cancelled_aborts_at_once(host: Host) -> None:
    async with serving(host, exit_timeout_secs=60) as served:
        call = asyncio.ensure_future(refusal(served.unary("wait")))
        await served.service.begun.wait()
        stop = asyncio.ensure_future(served.stop())
        await asyncio.sleep(0.1)
        stop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(stop, 2)
        await asyncio.wait_for(served.service.cancelled.wait(), 2)
        assert (await call)[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@asynchronous
async def test_a_port_is_free_again_after_the_stop(host: Host) -> None:
    async with serving(host) as served:
        await served.unary("echo", b"x")
        await served.stop()
        async with serving(host, grpc_port=served.port) as other:
            assert await other.unary("echo", b"y") == b"y"
