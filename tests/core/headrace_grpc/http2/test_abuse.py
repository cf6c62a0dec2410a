"""Attacks of a hostile peer (docs/spec/security.md C14, and the advisories that name HTTP/2).

Each attack ends its own connection, or costs next to nothing. Another client is served meanwhile and
afterwards, and the server holds no memory for the attack.
"""

from __future__ import annotations

import asyncio
import gzip
import random
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hyperframe import frame as frames

from headrace_grpc.http2.connection import Connection
from headrace_grpc.http2.connections import Connections, Service
from headrace_grpc.http2.headers import RequestHeaders
from headrace_grpc.http2.lifetime import Keepalive
from headrace_grpc.http2.limits import Limits
from headrace_grpc.http2.stream import Stream

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace
    from tests.core.headrace_grpc.conftest import Peer

CALM = 11  # ENHANCE_YOUR_CALM
PRIORITY, RESET, SETTINGS, PING, UPDATE, CONTINUATION = 2, 3, 4, 6, 8, 9
MIB = 1 << 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
Connect = Callable[..., "Peer"]


def raw(kind: int, content: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def ending(peer: Peer) -> int | None:
    """The code with which the server closes the connection. TCP may lose it, if more was sent meanwhile."""
    peer.wait_until_closed()
    codes = [each.error_code for each in peer.seen if isinstance(each, frames.GoAwayFrame)]
    return codes[-1] if codes else CALM if peer.was_reset else None


@pytest.fixture
def harmless(native: Headrace, connect: Connect) -> Callable[[], Any]:
    """A context in which another client stays served, and at the end of which the server holds no more memory than
    before."""

    @contextmanager
    def watch(limit_bytes: int = 24 * MIB) -> Iterator[None]:
        neighbour = connect(native.grpc)
        assert neighbour.ask(1).status == 0
        before = native.rss_bytes
        native.forget_peak()
        yield
        began = time.monotonic()
        assert neighbour.ask(3).status == 0
        assert time.monotonic() - began < 5
        assert native.peak_rss_bytes < before + limit_bytes

    return watch


def blocks(peer: Peer) -> tuple[bytes, bytes]:
    """The header block of a call, and the one, all of it indexed, of those after it."""
    return peer.block(peer.fields()), peer.block(peer.fields())


# ------------------------------------------------------------------- many short streams


def test_rapid_resets_cost_their_turn_and_nothing_else(peer: Peer, harmless: Any) -> None:
    """CVE-2023-44487. A client may cancel as fast as it can; tests/attack measures the cost for others."""
    first, rest = blocks(peer)
    with harmless():
        for stream in range(1, 100_001, 2):
            peer.send(raw(1, rest if stream > 1 else first, stream, 4), raw(RESET, b"\0\0\0\x08", stream))
        assert peer.ask(100_001).status == 0


def test_resets_of_queued_requests_leave_nothing_in_the_queue(native: Headrace, peer: Peer, gate: Gate) -> None:
    """More than streams may be open at a time, fewer than abuse would be."""
    peer.call(1, "ModelInfer", peer.infer("slow"))
    gate.wait_until_running()
    for stream in range(3, 2403, 2):
        peer.call(stream, "ModelInfer", peer.infer("slow"))
        peer.send(raw(RESET, b"\0\0\0\x08", stream))
    assert peer.ask(2403).status == 0
    native.wait_until_pending("slow", 0)
    gate.open()
    assert peer.answer(1).status == 0


@pytest.mark.parametrize("fault", [
    pytest.param(lambda peer, stream: raw(UPDATE, bytes(4), stream), id="an increment of nothing"),
    pytest.param(lambda peer, stream: raw(UPDATE, b"\x7f\xff\xff\xff", stream), id="a window that overflows"),
    pytest.param(lambda peer, stream: raw(PRIORITY, bytes(4), stream), id="a priority that is too short"),
    pytest.param(lambda peer, stream: raw(0, b"x", stream, 1) + raw(0, b"x", stream, 1), id="data after the end"),
    pytest.param(lambda peer, stream: raw(1, b"", stream, 4), id="trailers that do not end"),
])  # fmt: skip
def test_resets_that_the_server_is_made_to_send_count_too(
    peer: Peer, harmless: Any, fault: Callable[[Peer, int], bytes]
) -> None:
    """CVE-2025-8671."""
    first, rest = blocks(peer)
    with harmless():
        for stream in range(1, 100_001, 2):
            peer.send(raw(1, rest if stream > 1 else first, stream, 4), fault(peer, stream))
        assert ending(peer) in (CALM, 5)


def test_malformed_requests_end_the_connection(peer: Peer, harmless: Any) -> None:
    """CVE-2019-9514: each is answered by a RST_STREAM, which the peer does not read."""
    with harmless():
        for stream in range(1, 100_001, 2):
            peer.send(raw(1, b"\x82", stream, 5))
        assert ending(peer) == CALM


# --------------------------------------------------------------------- frames of no use


def flood(peer: Peer, *pieces: bytes, count: int = 400_000) -> None:
    """Send at most ``count`` frames, without reading."""
    burst = b"".join(pieces) * (4096 // len(pieces))
    for _ in range(count // 4096):
        peer.send(burst)


@pytest.mark.parametrize("piece", [
    pytest.param(raw(PING, bytes(8)), id="pings, CVE-2019-9512"),
    pytest.param(raw(SETTINGS), id="empty settings, CVE-2019-9515"),
    pytest.param(raw(SETTINGS, struct.pack(">HI", 4, 5)), id="settings"),
    pytest.param(raw(PRIORITY, bytes(5), 1), id="priorities, CVE-2019-9513"),
    pytest.param(raw(UPDATE, b"\0\0\0\0", 1), id="windows"),
    pytest.param(raw(0, b"", 1), id="empty data, CVE-2019-9518"),
    pytest.param(raw(0, b"\0", 1, 8), id="data of nothing but padding"),
    pytest.param(raw(0x77), id="unknown frames"),
    pytest.param(raw(PING, bytes(8), 0, 1), id="answers to pings"),
    pytest.param(raw(SETTINGS, b"", 0, 1), id="acknowledgements"),
    pytest.param(raw(7, bytes(8)), id="farewells"),
])  # fmt: skip
def test_a_flood_ends_the_connection(peer: Peer, harmless: Any, piece: bytes) -> None:
    peer.start(1, "ModelStreamInfer")
    peer.send(peer.window(1, 1))
    piece = peer.window(1, 1).serialize() if piece[3] == UPDATE else piece
    with harmless():
        flood(peer, piece)
        assert ending(peer) == CALM


def test_pings_between_answers_are_forgiven_within_reason(peer: Peer) -> None:
    for stream in range(1, 21, 2):
        peer.send(raw(PING, bytes(8)))
        assert peer.ask(stream).status == 0


# ------------------------------------------------------------------------------ headers


@pytest.mark.parametrize("size", [0, 1, 1000, 16_000])
def test_a_header_block_that_never_ends_ends_the_connection(peer: Peer, harmless: Any, size: int) -> None:
    """CVE-2024-27316 and its kin. Nothing of it is indexed, so that it is only long."""
    with harmless():
        peer.send(raw(1, peer.block(peer.fields()), 1))
        piece = (b"\x00\x01a\x01b" * 4000)[:size]
        for _ in range(4000):
            peer.send(raw(CONTINUATION, piece, 1))
        assert ending(peer) == CALM


def test_a_header_bomb_is_not_unpacked(peer: Peer, harmless: Any) -> None:
    """An entry of 4 KB in the table, and 16,000 times its index: 64 MB of headers in 16 KB."""
    with harmless():
        peer.send(raw(1, peer.block([*peer.fields(), ("x-bomb", "b" * 3900)]) + b"\xbe" * 16_000, 1, 4))
        assert ending(peer) == CALM


def test_headers_beyond_the_limit_are_refused_and_the_connection_stays(peer: Peer) -> None:
    more = [(f"x-{number}", "v" * 1000) for number in range(20)]
    peer.start(1, "ServerLive", *more)
    answer = peer.answer(1)
    assert (answer.status, answer.trailers[":status"]) == (8, "200")  # RESOURCE_EXHAUSTED
    assert peer.ask(3).status == 0


def test_many_small_fields_count_with_their_overhead(peer: Peer) -> None:
    """RFC 9113, section 6.5.2: 32 bytes each, so that empty ones are not free."""
    peer.start(1, "ServerLive", *((f"{number % 10}", "") for number in range(700)))
    assert peer.answer(1).status == 8


def test_a_table_of_any_size_is_bounded(peer: Peer, harmless: Any) -> None:
    """The peer would like 4 GB of it, and fills it again and again."""
    with harmless():
        for stream in range(1, 2001, 2):
            assert peer.ask(stream, "ServerLive", b"", ("x-fill", f"{stream}" * 700)).status == 0


# --------------------------------------------------------------------------------- data


def test_a_claimed_message_costs_nothing_before_it_comes(peer: Peer, harmless: Any) -> None:
    with harmless():
        for stream in range(1, 2001, 2):
            peer.start(stream, "ModelInfer" if stream % 4 == 1 else "ModelStreamInfer")
            peer.send(peer.data(stream, struct.pack(">BI", 0, 2**31 - 1) + bytes(100)))
        peer.settle()


def test_small_messages_that_nobody_reads_cost_little(peer: Peer, gate: Gate, harmless: Any) -> None:
    """As many empty messages as a window holds, one per frame, after as many as the stream has in flight."""
    peer.start(1, "ModelStreamInfer")
    request = peer.framed(peer.infer("slow"))
    peer.send(*[peer.data(1, request)] * 1024)
    with harmless():
        peer.send(*[peer.data(1, bytes(5))] * 30_000)
        peer.settle()
    gate.open()


def test_a_message_beyond_the_limit_is_refused_at_its_prefix(peer: Peer) -> None:
    peer.start(1, "ModelInfer")
    peer.send(peer.data(1, struct.pack(">BI", 0, 2**31)))
    assert peer.answer(1).status == 8


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ServerLive"])
def test_a_packed_message_is_no_larger_than_what_it_packs(peer: Peer, harmless: Any, method: str) -> None:
    """64 MiB of zeros in 64 KB: allowed, and freed afterwards."""
    bomb = gzip.compress(bytes(64 * MIB), 9)
    with harmless(limit_bytes=400 * MIB):
        peer.send(peer.headers(1, peer.fields(method, ("grpc-encoding", "gzip"))))
        content = peer.framed(bomb, packed=1)
        peer.send(*(peer.data(1, content[at : at + 16384]) for at in range(0, len(content), 16384)))
        peer.send(peer.data(1, b"", "END_STREAM"))
        assert peer.answer(1).status in (3, 13)  # it is no request


def test_many_streams_that_ask_and_do_not_read_are_bounded(native: Headrace, connect: Connect, harmless: Any) -> None:
    """Windows of nothing, and as many answers as streams may be open."""
    peer = connect(native.grpc, {4: 0})
    with harmless(limit_bytes=64 * MIB):
        for stream in range(1, 2049, 2):
            peer.call(stream, "ModelInfer", peer.infer(content=bytes(8192)))
        peer.settle()


# --------------------------------------------------------------------- those who do nothing


class Nothing(Service[int]):
    """Streams that never answer."""

    def interpret(self, headers: RequestHeaders) -> int:
        return 0

    def open(self, connection: Connection, id: int, meaning: int) -> Stream:
        return Stream(connection, id)


#: A sweep runs every 50 ms.
QUICK = Keepalive(timeout=0.2)


def serving(act: Callable[[int], None], limits: Limits, service: Service[int] | None = None) -> None:
    """Runs ``act`` on a thread, with the port of a server of ``service``, or of `Nothing`."""

    async def serve() -> None:
        connections = Connections(service or Nothing(), limits, QUICK)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(connections), "127.0.0.1", 0)
        connections.watch()
        try:
            await asyncio.wait_for(asyncio.to_thread(act, server.sockets[0].getsockname()[1]), 20)
        finally:
            server.close()
            await connections.drain(0)

    asyncio.run(serve())


@pytest.mark.parametrize("preface", [
    pytest.param(b"", id="nothing"),
    pytest.param(PREFACE[:10], id="half a preface"),
    pytest.param(PREFACE, id="no settings"),
    pytest.param(PREFACE + raw(SETTINGS) + b"\0\0", id="half a frame"),
    pytest.param(PREFACE + raw(SETTINGS) + raw(1, b"\x82", 1), id="half a header block"),
])  # fmt: skip
def test_peer_that_stops_sending_is_disconnected(connect: Connect, preface: bytes) -> None:
    def act(port: int) -> None:
        peer = connect(port, start=False)
        peer.send(preface)
        began = time.monotonic()
        peer.wait_until_closed()
        assert 0.25 < time.monotonic() - began < 30

    serving(act, Limits(head_seconds=0.3))


def test_headers_that_drip_are_not_waited_for(connect: Connect) -> None:
    def act(port: int) -> None:
        peer = connect(port)
        peer.settle()
        peer.send(raw(1, peer.block(peer.fields())[:3], 1))
        began = time.monotonic()
        while not peer.was_reset and time.monotonic() - began < 20:
            peer.send(raw(CONTINUATION, b"", 1)[:5])
            peer.listen(0.1)
            peer.send(raw(CONTINUATION, b"", 1)[5:])
        peer.wait_until_closed()

    serving(act, Limits(head_seconds=0.3, continuations=10_000))


def test_a_peer_that_reads_nothing_is_sent_away(connect: Connect) -> None:
    """It keeps its windows shut; what waits for them would wait for ever."""

    class Answers(Nothing):
        def open(self, connection: Connection, id: int, meaning: int) -> Stream:
            stream = Stream(connection, id)
            stream.respond(b"\x88", b"", bytes(1000), b"\x88")
            return stream

    def act(port: int) -> None:
        peer = connect(port, {4: 0})
        peer.start(1)
        began = time.monotonic()
        peer.wait_until_closed()
        assert 0.25 < time.monotonic() - began < 30

    serving(act, Limits(unread_seconds=0.3), Answers())


def test_hundreds_that_say_nothing_disturb_nobody(native: Headrace, connect: Connect, harmless: Any) -> None:
    with harmless():
        idle = [connect(native.grpc, start=False) for _ in range(400)]
        assert connect(native.grpc).ask(1).status == 0
        for each in idle:
            each.close()


def test_http_1_is_refused_without_a_word_in_the_log(native: Headrace, connect: Connect) -> None:
    before = len(native.lines)
    for _ in range(20):
        peer = connect(native.grpc, start=False)
        peer.send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        peer.wait_until_closed()
    assert native.lines[before:] == []


def test_answer_after_a_protocol_error_is_not_written(native: Headrace, connect: Connect) -> None:
    """The calls of a connection that ends are dropped a few in each turn of the loop; some are answered meanwhile."""
    calls = 90
    for _ in range(5):
        peer = connect(native.grpc)
        first, rest = (peer.block(peer.fields("ModelInfer")) for _ in range(2))
        content = peer.framed(peer.infer())
        peer.send(
            *(raw(1, first if each == 0 else rest, 2 * each + 1, 4) for each in range(calls)),
            *(raw(0, content, 2 * each + 1, 1) for each in range(calls)),
            raw(PING, bytes(7)),
        )
        assert peer.goaway() == 6  # FRAME_SIZE_ERROR
    assert "Traceback" not in native.log


def test_noise_ends_connections_and_nothing_else(native: Headrace, connect: Connect, harmless: Any) -> None:
    chance = random.Random(7)
    with harmless():
        for _ in range(300):
            peer = connect(native.grpc)
            peer.settle()
            kind, flags, stream = chance.randrange(12), chance.randrange(256), chance.choice([0, 1, 1, 2, 3, 2**31 - 1])
            peer.start(1)
            peer.send(raw(kind, chance.randbytes(chance.randrange(40)), stream, flags), raw(PING, bytes(8)))
            peer.close()
    assert "Traceback" not in native.log
    assert "failed" not in native.log
