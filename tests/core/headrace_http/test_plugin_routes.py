"""Routes of plugins, and answers that are sent while they are created, on raw sockets.

For the native host, and the hosts of plugins, whose tests import these.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar, cast

import pytest

from headrace.config.option_parts import Restriction
from headrace.errors import HeadraceError, InvalidArgument, Unavailable
from headrace.frontends.extension import Extension
from headrace_http.http_host import HttpHost
from headrace_http.message import HttpReply, HttpRequest
from headrace_http.plugin_routes import HttpCall, HttpRoute, HttpStream

MakeCaller = Callable[..., Any]
Host = type[HttpHost]
X = {"X": ("UINT8", (-1,))}
LIMIT_S = 90
#: Large enough that a few do not fit into what the system keeps for a caller who does not read.
CHUNK = b"x" * (256 * 1024)
#: More than the system may buffer of an answer.
ON_THE_WAY = 16 << 20


class Ticks(HttpRoute):
    """Streams what the test sets up, and reports its progress."""

    name: ClassVar[str] = "GET /ticks/{word}"
    chunks: ClassVar[list[bytes]] = []
    fails: ClassVar[Exception | None] = None
    headers: ClassVar[list[tuple[bytes, bytes]]] = [(b"Content-Type", b"text/plain")]
    #: Given before each chunk.
    permits: ClassVar[asyncio.Semaphore]
    made: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    async def answer(self, call: HttpCall) -> HttpReply | HttpStream:
        if call.values["word"] == "whole":
            return HttpReply(200, self.headers, (call.values["word"].encode(), bytes(call.request.body)))
        return HttpStream(200, self.headers, self.stream())

    async def stream(self) -> AsyncIterator[bytes]:
        try:
            for chunk in self.chunks:
                await self.permits.acquire()
                Ticks.made += 1
                yield chunk
            if self.fails is not None:
                raise self.fails
        finally:
            Ticks.closed += 1


class Head(Ticks):
    name: ClassVar[str] = "HEAD /ticks/{word}"


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> type[Ticks]:
    for name, value in {"chunks": [b"one", b"two"], "fails": None, "made": 0, "closed": 0}.items():
        monkeypatch.setattr(Ticks, name, value)
    return Ticks


class Wire:
    """A client that reads when the test calls it, through a small window."""

    opened: ClassVar[list[socket.socket]] = []

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.opened.append(self.socket)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 * 1024)
        self.socket.setblocking(False)
        self.received = bytearray()

    async def connect(self, port: int) -> Wire:
        await asyncio.get_running_loop().sock_connect(self.socket, ("127.0.0.1", port))
        return self

    async def ask(self, path: str = "/ticks/a", method: str = "GET", version: str = "1.1", rest: str = "") -> Wire:
        head = f"{method} {path} HTTP/{version}\r\nHost: h\r\n{rest}\r\n"
        await asyncio.get_running_loop().sock_sendall(self.socket, head.encode())
        return self

    async def until(self, wanted: bytes) -> bytearray:
        """Return the received bytes when they contain ``wanted``."""
        while self.received.find(wanted, max(0, len(self.received) - (1 << 21))) < 0:
            some = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 20)
            assert some, self.received[-2000:]
            self.received += some
        return self.received

    async def to_the_end(self) -> bytearray:
        """Return the received bytes when the server has closed the connection."""
        while some := await asyncio.get_running_loop().sock_recv(self.socket, 1 << 20):
            self.received += some
        return self.received

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def unchunked(raw: bytes | bytearray) -> tuple[bytes, bool]:
    """Return the body after the head of ``raw``, and True if its last chunk has arrived."""
    begin, body = raw.index(b"\r\n\r\n") + 4, bytearray()
    while (end := raw.find(b"\r\n", begin)) >= 0:
        count = int(raw[begin:end], 16)
        if not count:
            return bytes(body), True
        begin = end + 2 + count + 2
        body += raw[end + 2 : begin - 2]
    return bytes(body), False


@asynccontextmanager
async def serving(host: Host, caller: Any, *routes: type[HttpRoute]) -> AsyncIterator[HttpHost]:
    added = type("Added", (Extension,), {"name": "added", "adds": routes or (Ticks, Head)})
    caller.engine.extension_parts = [*caller.engine.extension_parts, added]
    del caller.engine.extensions
    Ticks.permits = asyncio.Semaphore(0)
    frontend = host(caller.engine)
    await frontend.start()
    try:
        yield frontend
    finally:
        await asyncio.wait_for(frontend.stop(), LIMIT_S)


def sweep(frontend: HttpHost, times: int) -> None:
    """Act as if this many seconds had passed."""
    for _ in range(times):
        for connection in tuple(connections_of(frontend)._open):
            connection.sweep()


def connections_of(frontend: HttpHost) -> Any:
    return cast("Any", getattr(frontend, "_server", frontend))._connections  # of hypercorn, or its own


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


@pytest.fixture
def run(host: Host, make_caller: MakeCaller) -> Callable[..., None]:
    """Runs a test as ``scenario(frontend)`` on one host after the other."""

    def run(scenario: Callable[..., Awaitable[None]], *routes: type[HttpRoute], **options: Any) -> None:
        local = {"http_address": "127.0.0.1", "http_port": 0, "exit_timeout_secs": 1}

        async def main() -> None:
            async with serving(host, make_caller(X, **(local | options)), *routes) as frontend:
                try:
                    await asyncio.wait_for(scenario(frontend), LIMIT_S)
                finally:
                    while Wire.opened:
                        Wire.opened.pop().close()

        asyncio.run(main())

    return run


Run = Callable[..., None]


# ------------------------------------------------------------------------------------------------ answers


def test_a_chunk_arrives_before_the_next_is_made(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        wire = await (await Wire().connect(frontend.port)).ask()
        Ticks.permits.release()
        head = (await wire.until(b"one")).lower()
        assert head.startswith(b"http/1.1 200")
        assert b"transfer-encoding: chunked\r\n" in head
        assert b"content-type: text/plain\r\n" in head
        assert Ticks.made == 1
        Ticks.permits.release()
        assert unchunked(await wire.until(b"0\r\n\r\n")) == (b"onetwo", True)
        await (await wire.ask("/v2/models/echo")).until(b'"platform"')  # the connection stays open

    run(scenario)


def test_an_answer_may_be_whole_and_has_placeholders_and_body(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        wire = await Wire().connect(frontend.port)
        await wire.ask("/ticks/whole?query", rest="Content-Length: 4\r\n")
        await asyncio.get_running_loop().sock_sendall(wire.socket, b"body")
        assert b"content-length: 9\r\n" in (await wire.until(b"wholebody")).lower()
        await wire.ask("/ticks/whole", "PUT")
        assert b"Method Not Allowed" in await wire.until(b"Allowed")
        await wire.ask("/ticks/whole/more")
        await wire.until(b"Not Found")

    run(scenario)


def test_one_of_http_1_0_ends_with_the_connection(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        wire = await (await Wire().connect(frontend.port)).ask(version="1.0")
        Ticks.permits = asyncio.Semaphore(2)
        head, _, body = (await wire.to_the_end()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert body == b"onetwo"

    run(scenario)


def test_one_to_head_has_no_body_and_makes_none(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        wire = await (await Wire().connect(frontend.port)).ask(method="HEAD", rest="Connection: close\r\n")
        head, _, body = (await wire.to_the_end()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert not body
        assert not Ticks.made

    run(scenario)


def test_an_empty_chunk_is_no_end_and_an_empty_stream_is_an_answer(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        Ticks.permits = asyncio.Semaphore(3)
        wire = await Wire().connect(frontend.port)
        Ticks.chunks = [b"one", b"", b"three"]
        assert unchunked(await (await wire.ask()).until(b"0\r\n\r\n")) == (b"onethree", True)
        Ticks.chunks = []
        wire.received.clear()
        assert unchunked(await (await wire.ask()).until(b"0\r\n\r\n")) == (b"", True)

    run(scenario)


def test_pipelined_answers_keep_the_order_of_the_requests(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        wire = await Wire().connect(frontend.port)
        for path in ("/ticks/whole", "/ticks/a", "/ticks/b", "/v2/models/echo"):
            await wire.ask(path)
        await wire.until(b"whole")
        assert b"one" not in wire.received
        for _ in range(4):
            Ticks.permits.release()
        answer = await wire.until(b'"platform"')
        assert answer.count(b"200") == 4
        assert answer.count(b"one") == answer.count(b"two") == 2
        places = [answer.index(b"whole"), answer.index(b"two"), answer.rindex(b"one"), answer.index(b'"platform"')]
        assert places == sorted(places)

    run(scenario)


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (InvalidArgument("not so"), 400, "not so"),
        (Unavailable("not now"), 503, "not now"),
        (ValueError("secret"), 500, "the request failed inside the server; its log has the reason"),
    ],
)
def test_an_error_before_the_first_chunk_has_a_status(run: Run, error: Exception, status: int, text: str) -> None:
    async def scenario(frontend: HttpHost) -> None:
        Ticks.chunks, Ticks.fails = [], error
        wire = await (await Wire().connect(frontend.port)).ask()
        head, _, body = (await wire.until(b"}")).partition(b"\r\n\r\n")
        assert int(head[9:12]) == status
        assert json.loads(body) == {"error": text}
        Ticks.fails = None
        wire.received.clear()
        await (await wire.ask("/ticks/whole")).until(b"whole")

    run(scenario)


@pytest.mark.parametrize("error", [Unavailable("no more"), ValueError("broken")])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_error_behind_a_chunk_is_no_end_of_the_answer(run: Run, error: Exception, version: str) -> None:
    async def scenario(frontend: HttpHost) -> None:
        Ticks.fails = error
        wire = await (await Wire().connect(frontend.port)).ask(version=version)
        Ticks.permits.release()
        await wire.until(b"one")
        Ticks.permits.release()
        try:
            answer = await wire.to_the_end()
        except ConnectionResetError:
            assert version == "1.0"  # nothing else would show it
            return
        assert version == "1.1"
        assert unchunked(answer) == (b"onetwo", False)

    run(scenario)


@pytest.mark.parametrize(
    "header",
    [
        (b"Content-Length", b"3"),
        (b"Transfer-Encoding", b"gzip"),
        (b"X", b"a\r\nSet-Cookie: b"),
        (b"X\r\nY", b"a"),
        (b"", b"a"),
        ("X", "text"),
    ],
)
@pytest.mark.parametrize("path", ["/ticks/whole", "/ticks/a"])
def test_headers_that_would_be_taken_for_something_else_are_not_sent(
    run: Run, monkeypatch: pytest.MonkeyPatch, header: tuple[Any, Any], path: str
) -> None:
    monkeypatch.setattr(Ticks, "headers", [header])

    async def scenario(frontend: HttpHost) -> None:
        answer = await (await (await Wire().connect(frontend.port)).ask(path)).until(b"its log has the reason")
        assert answer.startswith(b"HTTP/1.1 500")
        assert b"Cookie" not in answer

    run(scenario)


def test_an_answer_of_text_is_an_error_and_not_a_wait(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def text(_: Ticks, __: HttpCall) -> HttpReply:
        return HttpReply(200, (), ["text"])  # type: ignore[list-item]

    monkeypatch.setattr(Ticks, "answer", text)

    async def scenario(frontend: HttpHost) -> None:
        answer = await (await (await Wire().connect(frontend.port)).ask("/ticks/a")).until(b"its log has the reason")
        assert answer.startswith(b"HTTP/1.1 500")

    run(scenario)


# ------------------------------------------------------------------------------------------ slow and disconnected


def test_a_caller_who_does_not_read_stops_the_maker_and_gets_all_later(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        Ticks.chunks = [CHUNK] * 128
        Ticks.permits = asyncio.Semaphore(len(Ticks.chunks))
        wire, other = await (await Wire().connect(frontend.port)).ask(), await Wire().connect(frontend.port)
        await until(lambda: Ticks.made > 0)
        for _ in range(300):  # as many turns as all chunks would need
            other.received.clear()
            await (await other.ask("/v2/health/live")).until(b"\r\n\r\n")
        assert Ticks.made * len(CHUNK) < ON_THE_WAY
        body, is_whole = unchunked(await wire.until(b"\r\n0\r\n\r\n"))
        assert is_whole
        assert len(body) == 128 * len(CHUNK)

    run(scenario)


def test_callers_who_do_not_read_cost_no_more_than_is_on_the_way(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        Ticks.chunks = [CHUNK] * 48
        Ticks.permits = asyncio.Semaphore(10 * len(Ticks.chunks))
        wires = [await (await Wire().connect(frontend.port)).ask(rest="Connection: close\r\n") for _ in range(8)]
        other = await Wire().connect(frontend.port)
        for _ in range(100):
            other.received.clear()
            await (await other.ask("/v2/health/live")).until(b"\r\n\r\n")
        assert Ticks.made < 8 * 32  # of 8 * 48
        answers = await asyncio.gather(*(wire.to_the_end() for wire in wires))
        assert all(len(answer) > 48 * len(CHUNK) for answer in answers)
        assert Ticks.closed == 8

    run(scenario)


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("state", ["silent before the first", "silent", "full"])
def test_a_caller_who_leaves_ends_the_maker(run: Run, how: str, state: str) -> None:
    async def scenario(frontend: HttpHost) -> None:
        if state == "full":
            Ticks.chunks = [CHUNK] * 256
            Ticks.permits = asyncio.Semaphore(256)
        wire = await (await Wire().connect(frontend.port)).ask()
        if state == "silent":
            Ticks.permits.release()
            await wire.until(b"one")
        elif state == "full":
            await until(lambda: Ticks.made > 0)
        else:
            await until(lambda: frontend_tasks(frontend))
        (wire.reset if how == "reset" else wire.socket.close)()

        def is_over() -> bool:
            sweep(frontend, 1)
            return Ticks.closed == 1 or (state == "silent before the first" and not frontend_tasks(frontend))

        await until(is_over)
        assert Ticks.made < 256

    run(scenario)


def frontend_tasks(frontend: HttpHost) -> bool:
    """Return True if a request of a plugin's route is being answered."""
    return any("RouteHandler" in repr(task.get_coro()) for task in asyncio.all_tasks())


def test_a_caller_who_takes_nothing_for_too_long_is_given_up(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        Ticks.chunks = [CHUNK] * 256
        Ticks.permits = asyncio.Semaphore(256)
        await (await Wire().connect(frontend.port)).ask()
        await until(lambda: Ticks.made > 0)

        def is_over() -> bool:
            sweep(frontend, 1)
            return Ticks.closed == 1

        await until(is_over)
        assert Ticks.made < 256

    run(scenario, http_stall_timeout_secs=5)


def test_a_slow_caller_and_a_slow_maker_are_not_given_up(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        Ticks.chunks = [b"one", *[CHUNK] * 64]
        wire = await (await Wire().connect(frontend.port)).ask()
        Ticks.permits.release()
        await wire.until(b"one")
        sweep(frontend, 100)  # the maker has nothing to say
        for _ in range(64):
            Ticks.permits.release()
        while len(wire.received) < 64 * len(CHUNK):
            sweep(frontend, 1)  # the buffers are full all the time, and all the time something is taken
            some = await asyncio.get_running_loop().sock_recv(wire.socket, 1 << 16)
            assert some
            wire.received += some
        assert unchunked(await wire.until(b"\r\n0\r\n\r\n"))[1]

    run(scenario, http_stall_timeout_secs=5)


def test_half_a_close_is_no_leaving(run: Run) -> None:
    """The client half-closes, and takes the answer. The check that it is still connected must not be visible in it."""

    async def scenario(frontend: HttpHost) -> None:
        wire = await (await Wire().connect(frontend.port)).ask()
        Ticks.permits.release()
        await wire.until(b"one")
        wire.socket.shutdown(socket.SHUT_WR)
        for _ in range(20):
            await asyncio.sleep(0)
            sweep(frontend, 1)
        Ticks.permits.release()
        assert unchunked(await wire.to_the_end()) == (b"onetwo", True)

    run(scenario)


def test_stopping_has_the_answer_sent_to_its_end(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        wire = await (await Wire().connect(frontend.port)).ask()
        Ticks.permits.release()
        await wire.until(b"one")
        stopping = asyncio.ensure_future(frontend.stop())
        await asyncio.sleep(0)
        Ticks.permits.release()
        assert unchunked(await wire.to_the_end()) == (b"onetwo", True)
        await stopping

    run(scenario)


def test_a_caller_who_reads_a_long_stream_keeps_it_when_the_server_stops(run: Run) -> None:
    """Each step of the test is a second for the server, which gives its callers 2 s to read."""

    async def scenario(frontend: HttpHost) -> None:
        Ticks.chunks = [CHUNK] * 128
        Ticks.permits = asyncio.Semaphore(len(Ticks.chunks))
        wire = await (await Wire().connect(frontend.port)).ask()
        await wire.until(b"x")
        connections_of(frontend).taking_s = 2.0
        (connection,) = connections_of(frontend)._open
        transport = getattr(connection, "_socket_transport", None) or connection._transport
        for step in range(6):
            while len(wire.received) < step * 8 * len(CHUNK):
                some = await asyncio.get_running_loop().sock_recv(wire.socket, 1 << 20)
                assert some
                wire.received += some
            await until(lambda: transport.get_write_buffer_size() > 0)
            sweep(frontend, 1)
        assert connection in connections_of(frontend)._open

    run(scenario)


# ------------------------------------------------------------------------------------------- restrictions


def test_a_route_needs_the_key_of_its_category_and_a_body_within_bounds(run: Run) -> None:
    async def scenario(frontend: HttpHost) -> None:
        wire = await (await Wire().connect(frontend.port)).ask("/ticks/whole")
        assert (await wire.until(b"'key'")).startswith(b"HTTP/1.1 403")
        wire.received.clear()
        assert (await (await wire.ask("/ticks/whole", rest="key: secret\r\n")).until(b"whole")).startswith(
            b"HTTP/1.1 200"
        )
        wire.received.clear()
        await wire.ask("/ticks/whole", rest="key: secret\r\nContent-Length: 100000\r\n")
        assert (await wire.until(b"exceeds")).startswith(b"HTTP/1.1 400")

    rules: Mapping[str, Restriction] = {"inference": Restriction("key", "secret")}
    run(scenario, http_restricted_api=rules, http_max_input_size=1000)


def test_a_route_has_errors_of_its_own_form_also_for_what_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(route: Ticks, error: HeadraceError, usual: HttpReply, request: HttpRequest) -> HttpReply:
        return HttpReply(418, [(b"X-Error", error.code.name.encode())], [b"<", *usual.parts, b">"])

    monkeypatch.setattr(Ticks, "refusal", refusal)

    async def scenario(frontend: HttpHost) -> None:
        wire = await (await Wire().connect(frontend.port)).ask("/ticks/whole")
        assert (await wire.until(b"'key'\"}>")).startswith(b"HTTP/1.1 418")
        assert b"x-error: permission_denied" in bytes(wire.received).lower()  # a host may write names in small letters
        Ticks.chunks, Ticks.fails = [], ValueError("secret")
        wire.received.clear()
        await (await wire.ask(rest="key: secret\r\n")).until(b'<{"error":"the request failed inside the server')
        assert b"x-error: internal" in bytes(wire.received).lower()

    run(scenario, http_restricted_api={"inference": Restriction("key", "secret")})


TO_TEXTS = "POST /bounded/texts HTTP/1.1\r\nHost: h\r\n"


class Bounded(HttpRoute):
    """A route with an own limit, and a form of errors for all paths beside it."""

    name = "POST /bounded/texts"
    refusal_prefix = "/bounded/"
    max_body_bytes = 200_000

    async def answer(self, call: HttpCall) -> HttpReply:
        document = await call.read_json(has_texts=True)
        return HttpReply(200, [], [b"%d" % len(document[0])])

    def refusal(self, error: HeadraceError, usual: HttpReply, request: HttpRequest) -> HttpReply:
        text = f"<{request.method} {error.code.name} {request.headers.get(b'me', b'').decode()}>"
        return HttpReply(usual.status, [], [text.encode()])


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        ("GET /bounded/nothing HTTP/1.1\r\nHost: h\r\nMe: 1\r\n\r\n", 404, b"<GET NOT_FOUND 1>"),
        ("GET /bounded/texts HTTP/1.1\r\nHost: h\r\n\r\n", 405, b"<GET UNSUPPORTED >"),
        (TO_TEXTS + "Me: 2\r\nContent-Length: 200001\r\n\r\n", 413, b"INVALID_ARGUMENT 2>"),
        (TO_TEXTS + "Transfer-Encoding: chunked\r\n\r\n30d41\r\n" + 200_001 * "x", 413, b"<POST"),
        (TO_TEXTS + "Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, b"<POST"),
        (TO_TEXTS + "Content-Length: 199999\r\n\r\n" + f'["{"x" * 199_995}"]', 200, b"199995"),
        ("GET /elsewhere HTTP/1.1\r\nHost: h\r\n\r\n", 404, b'{"error":"Not Found"}'),
    ],
    ids=["unknown path", "method", "large", "large chunk", "broken chunk", "larger than the port's", "elsewhere"],
)  # fmt: skip
def test_a_route_words_what_the_host_refuses_below_its_prefix(run: Run, sent: str, status: int, text: bytes) -> None:
    async def scenario(frontend: HttpHost) -> None:
        wire = await Wire().connect(frontend.port)
        await asyncio.get_running_loop().sock_sendall(wire.socket, sent.encode())
        assert (await wire.until(text)).startswith(b"HTTP/1.1 %d" % status)

    run(scenario, Bounded, http_max_input_size=1000)


@pytest.mark.parametrize("prefix", ["bounded", "/bounded", "bounded/"])
def test_a_prefix_is_a_folder(prefix: str) -> None:
    with pytest.raises(TypeError, match="refusal_prefix"):
        cast("type[HttpRoute]", type("Wrong", (Bounded,), {"refusal_prefix": prefix})).check()
