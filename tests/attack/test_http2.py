"""Floods of HTTP/2 frames on the gRPC port: whatever a peer sends, and however fast, others are answered soon.

Everything is made before it is sent, so that the attackers cost nothing but the server. Each comes back as
often as it is sent away.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import grpc
import hpack
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as triton

if TYPE_CHECKING:
    from tests.conftest import Headrace

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CALM = 11
MIB = 1 << 20
#: How long each attack lasts in `nox -s attack` and in a plain run, and how many bytes are sent in one piece.
SECONDS, FEW_SECONDS = 1.5, 0.4
PIECE_BYTES = 1 << 20
SERVICE = "/inference.GRPCInferenceService/"

Frame = Callable[..., AbstractContextManager[None]]


def raw(kind: int, content: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def setting(name: int, value: int) -> bytes:
    return struct.pack(">HI", name, value)


def integer(value: int, prefix: int, first: int = 0) -> bytes:
    """RFC 7541, section 5.1."""
    bound = (1 << prefix) - 1
    if value < bound:
        return bytes([first | value])
    out, value = bytearray([first | bound]), value - bound
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def literal(name: bytes, value: bytes, first: int = 0x40) -> bytes:
    """Put into the table unless ``first`` is 0; not packed."""
    return bytes([first]) + integer(len(name), 7) + name + integer(len(value), 7) + value


def head(method: str = "ServerLive", *more: tuple[str, str]) -> tuple[bytes, bytes]:
    """The header block of a call, and that of the calls after it, which is nothing but references."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", SERVICE + method), (":authority", "x"),
              ("te", "trailers"), ("content-type", "application/grpc"), *more]  # fmt: skip
    encoder = hpack.Encoder()
    return encoder.encode(fields, huffman=False), encoder.encode(fields, huffman=False)


def streams(count: int, method: str = "ModelStreamInfer", tail: Callable[[int], bytes] = lambda stream: b"",
            flags: int = END_HEADERS) -> bytes:  # fmt: skip
    """``count`` calls, each followed by its ``tail``."""
    first, rest = head(method)
    return b"".join(
        raw(HEADERS, rest if number else first, 2 * number + 1, flags) + tail(2 * number + 1) for number in range(count)
    )


def blocks(*pieces: bytes, opening: bytes = b"", count: int = 10_000) -> bytes:
    """Calls whose header blocks are ``pieces`` in turn, after one whose block is ``opening`` and no call."""
    first, _ = head()
    start = raw(HEADERS, first, 1, END_HEADERS | END_STREAM)
    if opening:
        start += raw(HEADERS, first + opening, 3, END_HEADERS | END_STREAM)
    return start + b"".join(
        raw(HEADERS, pieces[number % len(pieces)], 2 * number + 5, END_HEADERS | END_STREAM) for number in range(count)
    )


def echo(size: int, model: str = "huge") -> bytes:
    """A framed request for an echo of ``size`` bytes."""
    request = triton.ModelInferRequest(model_name=model, raw_input_contents=[bytes(size)])
    request.inputs.add(name="IN", datatype="UINT8", shape=[size])
    body: bytes = request.SerializeToString()
    return b"\0" + struct.pack(">I", len(body)) + body


def body(stream: int, content: bytes, size: int = 16384, flags: int = 0) -> bytes:
    """``content`` in frames of ``size`` bytes."""
    return b"".join(raw(DATA, content[at : at + size], stream, flags) for at in range(0, len(content), size))


def waiting(count: int) -> bytes:
    """``count`` calls, whose answers may not go: windows are shut."""
    return raw(SETTINGS, setting(4, 0)) + streams(
        count, "ModelInfer", lambda stream: body(stream, echo(2000)) + raw(DATA, b"", stream, END_STREAM)
    )


BIG_NAME = literal(b"x" * 3900, b"")
ONE = b"\xbe"  # what was put into the table last
#: What an attacker says first, and what it repeats.
FLOODS: dict[str, Callable[[], tuple[bytes, bytes]]] = {
    "settings of 64 window sizes": lambda: (
        streams(1000), raw(SETTINGS, b"".join(setting(4, 60_000 + each) for each in range(64)))),
    "settings of one window size": lambda: (
        streams(1000), raw(SETTINGS, setting(4, 5)) + raw(SETTINGS, setting(4, 50_000))),
    "the largest of window sizes": lambda: (
        streams(1000), raw(SETTINGS, setting(4, 2**31 - 1)) + raw(SETTINGS, setting(4, 9))),
    "table sizes up and down": lambda: (
        streams(1000), raw(SETTINGS, setting(1, 0)) + raw(SETTINGS, setting(1, 2**32 - 1))),
    "empty settings": lambda: (b"", raw(SETTINGS)),
    "acknowledgements": lambda: (b"", raw(SETTINGS, b"", 0, 1)),
    "pings": lambda: (b"", raw(PING, bytes(8))),
    "answers to pings": lambda: (b"", raw(PING, bytes(8), 0, 1)),
    "priorities": lambda: (streams(1), raw(PRIORITY, bytes(5), 1)),
    "unknown frames": lambda: (b"", raw(0x77)),
    "farewells": lambda: (b"", raw(7, bytes(8))),
    "resets of a closed stream": lambda: (streams(1) + raw(RESET, bytes(4), 1), raw(RESET, bytes(4), 1)),
    "windows of one byte, for a stream that has nothing to say": lambda: (streams(1), raw(UPDATE, b"\0\0\0\1", 1)),
    "windows of one byte, for an answer": lambda: (
        raw(SETTINGS, setting(4, 0)) + streams(1, "ModelInfer", lambda stream: body(stream, echo(60_000)))
        + raw(DATA, b"", 1, END_STREAM), raw(UPDATE, b"\0\0\0\1", 1)),
    "windows of one byte, for one of a thousand answers": lambda: (waiting(1000), raw(UPDATE, b"\0\0\0\1", 1)),
    "windows of one byte, for a thousand answers": lambda: (
        waiting(1000), b"".join(raw(UPDATE, b"\0\0\0\1", 2 * each + 1) for each in range(1000))),
    "windows of the connection, for a thousand answers": lambda: (waiting(1000), raw(UPDATE, b"\0\0\0\1", 0)),
    "data of nothing": lambda: (streams(1), raw(DATA, b"", 1)),
    "data of nothing but padding": lambda: (streams(1), raw(DATA, b"\xff" + bytes(255), 1, PADDED)),
    "data of one byte and padding": lambda: (
        streams(1), raw(DATA, b"\1\0\0", 1, PADDED)),
    "a message byte by byte": lambda: (
        streams(1) + raw(DATA, b"\0\x7f\xff\xff\xff", 1), raw(DATA, b"\0", 1)),
    "a request byte by byte": lambda: (
        streams(1, "ModelInfer") + raw(DATA, b"\0\x7f\xff\xff\xff", 1), raw(DATA, b"\0", 1)),
    "many messages byte by byte": lambda: (
        streams(1), body(1, echo(64), 1)),
    "empty messages": lambda: (streams(1), raw(DATA, bytes(5), 1)),
    "many empty messages in a frame": lambda: (
        streams(8), b"".join(raw(DATA, bytes(5) * 3000, 2 * n + 1) for n in range(8))),
    "data of streams that are closed": lambda: (
        streams(500) + b"".join(raw(RESET, bytes(4), 2 * each + 1) for each in range(500)), raw(DATA, b"x", 1)),
}  # fmt: skip

#: What is said once, for want of further streams.
ONCE: dict[str, Callable[[], bytes]] = {
    "references to long names": lambda: blocks(head()[1] + ONE * 15, head()[1] + ONE * 14, opening=BIG_NAME),
    "references to long values": lambda: blocks(
        *(head()[1] + ONE * each for each in range(3, 16)), opening=literal(b"x", b"y" * 3900)),
    "many references": lambda: blocks(*(head()[1] + b"\x90" * each for each in (1300, 1301, 1302))),
    "many small headers": lambda: blocks(
        *(head()[1] + literal(b"a", b"", 0) * each for each in (1300, 1301)), count=3000),
    "updates of the table's size": lambda: blocks(b"\x20" * 16_000 + b"\x3f\xe1\x1f" + head()[1], count=1000),
    "a table that is filled again and again": lambda: blocks(
        *(head()[1] + b"".join(literal(b"%d" % each, b"") for each in range(start, start + 100))
          for start in range(0, 1000, 100))),
    "huge cookies": lambda: blocks(
        *(head()[1] + literal(b"cookie", each * 15_000, 0) for each in (b"c", b"d")), count=3000),
    "packed headers": lambda: blocks(
        head()[1] + b"\0\1a" + integer(14_000, 7, 0x80) + b"\x1f" * 14_000 + literal(b"b", b"", 0), count=1000),
    "malformed headers": lambda: blocks(b"\x82"),
    "unknown methods": lambda: streams(40_000, "Nonsense", flags=END_HEADERS | END_STREAM),
    "requests without a message": lambda: streams(40_000, "ModelInfer", flags=END_HEADERS | END_STREAM),
    "requests of nothing": lambda: streams(
        40_000, "ModelInfer", lambda stream: raw(DATA, bytes(5), stream, END_STREAM)),
    "rapid resets": lambda: streams(
        40_000, "ModelInfer", lambda stream: body(stream, echo(100)) + raw(DATA, b"", stream, END_STREAM)
        + raw(RESET, b"\0\0\0\x08", stream)),
    "rapid resets of streams": lambda: streams(40_000, tail=lambda stream: raw(RESET, b"\0\0\0\x08", stream)),
    "resets that the server is made to send": lambda: streams(
        40_000, tail=lambda stream: raw(UPDATE, bytes(4), stream)),
    "streams that are opened and left": lambda: streams(40_000),
    "trailers": lambda: streams(40_000, tail=lambda stream: raw(HEADERS, b"", stream, END_HEADERS | END_STREAM)),
    "header blocks in empty pieces": lambda: streams(
        40_000, flags=0, tail=lambda stream: raw(CONTINUATION, b"", stream) * 14
        + raw(CONTINUATION, b"", stream, END_HEADERS)),
}  # fmt: skip


def opened(*calls: bytes) -> bytes:
    """Open a connection whose windows allow no answers."""
    return PREFACE + raw(SETTINGS, setting(4, 0)) + b"".join(calls)


def packed(size: int) -> bytes:
    """A framed request of few bytes for an echo of ``size``, which gzip makes small."""
    content = gzip.compress(echo(size)[5:], 1)
    return b"\1" + struct.pack(">I", len(content)) + content


class Attackers:
    """``count`` connections that send, and come back when they are sent away, until ``seconds`` are over."""

    def __init__(self, port: int, opening: bytes, flood: bytes, count: int, seconds: float) -> None:
        self._port = port
        self._opening = PREFACE + raw(SETTINGS) + opening
        self._flood = flood
        self._end = time.monotonic() + seconds
        #: Codes of the GOAWAYs that were read, and how often the server hung up.
        self.codes: list[int] = []
        self.endings = 0
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def join(self) -> Attackers:
        for thread in self._threads:
            thread.join()
        return self

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # attackers are on other machines
        while time.monotonic() < self._end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 5) as attacker:
                attacker.settimeout(0.2)
                self._attack(attacker)
                attacker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _attack(self, attacker: socket.socket) -> None:
        """Send, and read nothing but the end."""
        rest = memoryview(self._opening)
        while time.monotonic() < self._end:
            try:
                rest = rest[attacker.send(rest) :] or memoryview(self._flood)
            except TimeoutError:
                continue  # the server takes its time
            except OSError:
                self._note_ending(attacker)
                return

    def _note_ending(self, attacker: socket.socket) -> None:
        self.endings += 1
        seen = b""
        with contextlib.suppress(OSError):
            while some := attacker.recv(1 << 16):
                seen += some
        while len(seen) >= 9:
            size, kind = int.from_bytes(seen[:3], "big"), seen[3]
            if kind == 7:
                self.codes.append(int.from_bytes(seen[13:17], "big"))
            seen = seen[9 + size :]


@contextlib.contextmanager
def innocents(port: int) -> Iterator[None]:
    """A stock client beside the attackers: all of its calls succeed, and soon."""
    done = threading.Event()
    waits: list[float] = []
    request = triton.ModelInferRequest(model_name="echo", raw_input_contents=[np.array([1, 2], np.float32).tobytes()])
    request.inputs.add(name="IN", datatype="FP32", shape=[2])

    def ask() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(
                SERVICE + "ModelInfer", triton.ModelInferRequest.SerializeToString, triton.ModelInferResponse.FromString
            )
            while not done.wait(0.01):
                began = time.monotonic()
                answer = call(request, timeout=20)
                assert answer.raw_output_contents == request.raw_input_contents
                waits.append(time.monotonic() - began)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            done.set()
        asking.result(30)
    assert waits
    assert max(waits) < 5, waits


@pytest.fixture
def seconds(is_judged: bool) -> float:
    """The duration of an attack."""
    return SECONDS if is_judged else FEW_SECONDS


@pytest.fixture
def connect() -> Iterator[Callable[[int, bytes], socket.socket]]:
    """``connect(port, sent)``: a connection that has sent that, as far as the server has read it within 10 s, and that
    is closed at the end."""
    with contextlib.ExitStack() as stack:

        def connect(port: int, sent: bytes) -> socket.socket:
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            with contextlib.suppress(OSError):
                peer.sendall(sent)
            return peer

        yield connect


def test_a_thousand_answers_under_a_window_of_zero(
    serve_attacked: Callable[..., Headrace], under_attack: Frame, connect: Callable[[int, bytes], socket.socket]
) -> None:
    """Each of a megabyte, asked for in a kilobyte: 1 GB, of which the server holds 64 MiB and what is being made."""
    server = serve_attacked("--grpc-max-unread-size=67108864")
    first, rest = head("ModelInfer", ("grpc-encoding", "gzip"))
    call = packed(MIB)
    calls = (
        raw(HEADERS, rest if number else first, 2 * number + 1, END_HEADERS)
        + raw(DATA, call, 2 * number + 1, END_STREAM)
        for number in range(1000)
    )
    with under_attack(server), innocents(server.grpc):
        before = server.rss_bytes
        peer = connect(server.grpc, opened(*calls))
        select.select([], [], [], 4.0)
        peer.close()
        assert server.peak_rss_bytes < before + 160 * MIB


def test_streams_of_answers_that_are_not_read(
    serve_attacked: Callable[..., Headrace], under_attack: Frame, connect: Callable[[int, bytes], socket.socket]
) -> None:
    """64 streams of one connection, each of which asks for 40 MB: they share what one connection may hold."""
    server = serve_attacked("--grpc-max-unread-size=67108864")
    first, rest = head("ModelStreamInfer", ("grpc-encoding", "gzip"))
    call = packed(MIB)
    calls = [raw(HEADERS, rest if number else first, 2 * number + 1, END_HEADERS) for number in range(64)]
    requests = [raw(DATA, call, 2 * number + 1) for _ in range(40) for number in range(64)]
    with under_attack(server), innocents(server.grpc):
        before = server.rss_bytes
        peer = connect(server.grpc, opened(*calls, *requests))
        select.select([], [], [], 4.0)
        peer.close()
        assert server.peak_rss_bytes < before + 300 * MIB


@pytest.mark.parametrize("size", [16_384, 240_005], ids=["frames", "frame"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_thousand_messages_that_are_not_finished(
    attacked_natively: Headrace,
    under_attack: Frame,
    connect: Callable[[int, bytes], socket.socket],
    method: str,
    size: int,
) -> None:
    """240 kB of each: they take what has arrived, and no more."""
    message = struct.pack(">BI", 0, 1 << 30) + bytes(240_000)
    with under_attack(attacked_natively), innocents(attacked_natively.grpc):
        before = attacked_natively.rss_bytes
        peer = connect(
            attacked_natively.grpc,
            PREFACE + raw(SETTINGS) + streams(1000, method, lambda stream: body(stream, message, size)),
        )
        select.select([], [], [], 2.0)
        peer.close()
        assert attacked_natively.peak_rss_bytes < before + 300 * MIB


@pytest.mark.parametrize("kind", ["answers", "messages"])
def test_many_who_hold_much_make_room_for_each_other(
    serve_attacked: Callable[..., Headrace],
    under_attack: Frame,
    connect: Callable[[int, bytes], socket.socket],
    kind: str,
) -> None:
    """The bytes held for all of them are bounded."""
    server = serve_attacked("--grpc-max-held-size=67108864")
    message = struct.pack(">BI", 0, 1 << 30) + bytes(240_000)
    sent = {
        "answers": opened(
            streams(8, "ModelInfer", lambda stream: body(stream, echo(2 * MIB)) + raw(DATA, b"", stream, END_STREAM))
        ),
        "messages": PREFACE + raw(SETTINGS) + streams(64, "ModelInfer", lambda stream: body(stream, message)),
    }[kind]
    with under_attack(server), innocents(server.grpc):
        before = server.rss_bytes
        peers = [connect(server.grpc, sent) for _ in range(12)]
        select.select([], [], [], 2.0)
        assert sum(map(ended, peers)) >= 6
        for peer in peers:
            peer.close()
        assert server.peak_rss_bytes < before + 140 * MIB


def ended(peer: socket.socket) -> bool:
    """Return True if the server has ended the connection. Reads everything that it has sent."""
    try:
        while select.select([peer], [], [], 0)[0]:
            if not peer.recv(1 << 20):
                return True
    except ConnectionResetError:
        return True
    return False


@pytest.mark.parametrize("count", [pytest.param(1, id="alone"), pytest.param(16, id="together")])
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood(attacked_natively: Headrace, under_attack: Frame, name: str, count: int, seconds: float) -> None:
    opening, piece = FLOODS[name]()
    flood = piece * max(1, PIECE_BYTES // len(piece))
    with under_attack(attacked_natively), innocents(attacked_natively.grpc):
        Attackers(attacked_natively.grpc, opening, flood, count, seconds).join()


@pytest.mark.parametrize("count", [pytest.param(1, id="alone"), pytest.param(16, id="together")])
@pytest.mark.parametrize("name", ONCE)
def test_a_flood_of_calls(
    attacked_natively: Headrace, under_attack: Frame, name: str, count: int, seconds: float
) -> None:
    calls = ONCE[name]()
    with under_attack(attacked_natively), innocents(attacked_natively.grpc):
        Attackers(attacked_natively.grpc, b"", calls + raw(PING, bytes(8)) * 20_000, count, seconds).join()
