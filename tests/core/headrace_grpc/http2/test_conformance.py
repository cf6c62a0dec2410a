"""The rules of RFC 9113, one test each, on a socket. Codes are those of its section 7."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from hyperframe import frame as frames

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace
    from tests.core.headrace_grpc.conftest import Peer

NO_ERROR, PROTOCOL, INTERNAL, FLOW, TIMEOUT, CLOSED, SIZE, REFUSED, CANCEL, COMPRESSION = range(10)
HEADER_TABLE, PUSH, CONCURRENT, WINDOW, FRAME_BYTES, LIST_BYTES = range(1, 7)
Connect = Callable[..., "Peer"]
Act = Callable[["Peer"], object]


def raw(kind: int, content: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    """A frame with any content, valid or not."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


DATA, HEADERS, PRIORITY, RESET, SETTINGS, PROMISE, PING, GOAWAY, UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8


def setting(key: int, value: int) -> bytes:
    return raw(SETTINGS, struct.pack(">HI", key, value))


def opened(peer: Peer, stream: int = 1) -> Peer:
    """A call of which the headers have been sent."""
    peer.start(stream)
    return peer


def ended(peer: Peer, stream: int = 1) -> Peer:
    """A call to a model that does not answer yet, whose request is complete."""
    peer.call(stream, "ModelInfer", peer.infer("slow"))
    return peer


def unfinished(peer: Peer) -> bytes:
    """HEADERS whose block continues in CONTINUATION."""
    return raw(HEADERS, peer.block(peer.fields())[:10], 1)


# ----------------------------------------------------------- errors of the connection

CONNECTION: list[tuple[str, Act, int | set[int]]] = [
    # 4.1, 4.2
    ("a frame larger than was allowed", lambda p: p.send(struct.pack(">I", (1 << 24) - 1)[1:] + bytes(6)), SIZE),
    ("a frame of settings that is none", lambda p: p.send(raw(SETTINGS, bytes(5))), SIZE),
    # 5.1, 5.1.1
    ("data on an idle stream", lambda p: p.send(raw(DATA, b"", 1)), PROTOCOL),
    ("a reset of an idle stream", lambda p: p.send(raw(RESET, bytes(4), 1)), PROTOCOL),
    ("a window for an idle stream", lambda p: p.send(p.window(1, 5)), PROTOCOL),
    ("an even stream", lambda p: p.start(2), PROTOCOL),
    ("a stream below one that was opened", lambda p: (p.ask(5), p.start(3)), {PROTOCOL, CLOSED}),
    # 6.1
    ("data on no stream", lambda p: p.send(raw(DATA, b"x")), PROTOCOL),
    ("padding longer than the data", lambda p: opened(p).send(raw(DATA, b"\x05abcd", 1, PADDED)), PROTOCOL),
    ("padding without its length", lambda p: opened(p).send(raw(DATA, b"", 1, PADDED)), {PROTOCOL, SIZE}),
    # 6.2
    ("headers on no stream", lambda p: p.send(raw(HEADERS, p.block(p.fields()), 0, END_HEADERS)), PROTOCOL),
    ("padding longer than the headers", lambda p: p.send(raw(HEADERS, b"\xffabc", 1, END_HEADERS | PADDED)), PROTOCOL),
    ("headers too short for their priority", lambda p: p.send(raw(HEADERS, b"abc", 1, END_HEADERS | 0x20)),
     {PROTOCOL, SIZE}),
    ("headers of a stream that goes on without CONTINUATION", lambda p: p.send(unfinished(p), raw(PING, bytes(8))),
     PROTOCOL),
    ("a frame of an unknown kind within a header block", lambda p: p.send(unfinished(p), raw(77, b"x", 1)), PROTOCOL),
    ("the continuation of another stream", lambda p: p.send(unfinished(p), raw(CONTINUATION, b"", 3)), PROTOCOL),
    # 6.3, 6.4
    ("a priority of no stream", lambda p: p.send(raw(PRIORITY, bytes(5))), PROTOCOL),
    ("a reset of no stream", lambda p: p.send(raw(RESET, bytes(4))), PROTOCOL),
    ("a reset that is too short", lambda p: opened(p).send(raw(RESET, bytes(3), 1)), SIZE),
    ("a priority of an idle stream that is too short", lambda p: p.send(raw(PRIORITY, bytes(4), 1)), SIZE),
    # 6.5
    ("settings of a stream", lambda p: p.send(raw(SETTINGS, b"", 1)), PROTOCOL),
    ("an acknowledgement with settings", lambda p: p.send(raw(SETTINGS, bytes(6), 0, ACK)), SIZE),
    ("ENABLE_PUSH that is no boolean", lambda p: p.send(setting(PUSH, 2)), PROTOCOL),
    ("a window of 2 GiB for streams", lambda p: p.send(setting(WINDOW, 1 << 31)), FLOW),
    ("frames below 16 KiB", lambda p: p.send(setting(FRAME_BYTES, (1 << 14) - 1)), PROTOCOL),
    ("frames of 16 MiB", lambda p: p.send(setting(FRAME_BYTES, 1 << 24)), PROTOCOL),
    # 6.6
    ("a promise", lambda p: opened(p).send(raw(PROMISE, struct.pack(">I", 2) + p.block([]), 1, END_HEADERS)), PROTOCOL),
    # 6.7
    ("a ping of a stream", lambda p: p.send(raw(PING, bytes(8), 1)), PROTOCOL),
    ("a ping that is too short", lambda p: p.send(raw(PING, bytes(7))), SIZE),
    ("a ping that is too long", lambda p: p.send(raw(PING, bytes(9))), SIZE),
    # 6.8
    ("a farewell on a stream", lambda p: p.send(raw(GOAWAY, bytes(8), 1)), PROTOCOL),
    ("a farewell that is too short", lambda p: p.send(raw(GOAWAY, bytes(7))), SIZE),
    # 6.9
    ("an increment that is too short", lambda p: p.send(raw(UPDATE, bytes(3))), SIZE),
    ("an increment of nothing", lambda p: p.send(p.window(0, 1), raw(UPDATE, bytes(4))), PROTOCOL),
    ("a window beyond 2 GiB", lambda p: p.send(p.window(0, (1 << 31) - 1)), FLOW),
    # 6.10
    ("a continuation of nothing", lambda p: p.send(raw(CONTINUATION, b"", 1, END_HEADERS)), PROTOCOL),
    ("a continuation after the end of the headers",
     lambda p: opened(p).send(raw(CONTINUATION, p.block([("a", "b")]), 1, END_HEADERS)), PROTOCOL),
    # 4.3, and RFC 7541
    ("a header block that is none", lambda p: p.send(raw(HEADERS, b"\xff\xff\xff\xff\xff\xff\xff", 1, END_HEADERS)),
     COMPRESSION),
    ("an index beyond the table", lambda p: p.send(raw(HEADERS, b"\xfe", 1, END_HEADERS)), COMPRESSION),
    ("the index 0", lambda p: p.send(raw(HEADERS, b"\x80", 1, END_HEADERS)), COMPRESSION),
    ("a string cut short", lambda p: p.send(raw(HEADERS, b"\x00\x7fabc", 1, END_HEADERS)), COMPRESSION),
    ("a table larger than was allowed", lambda p: p.send(raw(HEADERS, b"\x3f\xe1\xff\x03", 1, END_HEADERS)),
     COMPRESSION),
    ("an update of the table behind a field",
     lambda p: p.send(raw(HEADERS, b"\x82\x20" + p.block(p.fields())[1:], 1, END_HEADERS)), COMPRESSION),
    ("a Huffman code that is padded by too much", lambda p: p.send(raw(HEADERS, b"\x00\x01a\x82\xff\xff", 1, 5)),
     COMPRESSION),
    ("a Huffman code that is padded with zeros", lambda p: p.send(raw(HEADERS, b"\x00\x01a\x81\x18", 1, 5)),
     COMPRESSION),
    ("a Huffman code with the end of strings in it",
     lambda p: p.send(raw(HEADERS, b"\x00\x01a\x85\x1f\xff\xff\xff\xff", 1, 5)), COMPRESSION),
    ("a block that is empty but for a table update that is too large, on trailers",
     lambda p: opened(p).send(raw(HEADERS, b"\x3f\xe1\xff\x03", 1, END_HEADERS | END_STREAM)), COMPRESSION),
]  # fmt: skip


@pytest.mark.parametrize(("act", "codes"), [row[1:] for row in CONNECTION], ids=[row[0] for row in CONNECTION])
def test_the_connection_ends_with(peer: Peer, gate: Gate, act: Act, codes: int | set[int]) -> None:
    act(peer)
    assert peer.goaway() in (codes if isinstance(codes, set) else {codes})


@pytest.mark.parametrize("preface", [
    b"GET / HTTP/1.1\r\nHost: test\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", bytes(100),
])  # fmt: skip
def test_peer_without_the_preface_is_disconnected(native: Headrace, connect: Connect, preface: bytes) -> None:
    peer = connect(native.grpc, start=False)
    peer.send(preface)
    peer.wait_until_closed()


def test_the_preface_may_come_in_pieces(native: Headrace, connect: Connect) -> None:
    peer = connect(native.grpc, start=False)
    for byte in b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + raw(SETTINGS) + raw(PING, b"12345678"):
        peer.send(bytes([byte]))
    assert peer.until(frames.PingFrame).opaque_data == b"12345678"


def test_the_server_speaks_settings_first(native: Headrace, connect: Connect) -> None:
    peer = connect(native.grpc)
    assert isinstance(peer.read(), frames.SettingsFrame)


def test_the_client_speaks_settings_first(native: Headrace, connect: Connect) -> None:
    peer = connect(native.grpc, start=False)
    peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", raw(PING, bytes(8)))
    assert peer.goaway() == PROTOCOL


def test_the_farewell_names_the_last_stream_that_was_taken(peer: Peer, gate: Gate) -> None:
    peer.ask(7)
    peer.send(raw(PING, bytes(3)))
    assert peer.until(frames.GoAwayFrame).last_stream_id == 7


# --------------------------------------------------------------- errors of one stream


def with_fields(*fields: tuple[str, str]) -> Act:
    """A call with exactly these headers."""
    return lambda p: p.send(p.headers(1, fields))


def with_more(*fields: tuple[str, str], **pseudo: str) -> Act:
    return lambda p: p.send(p.headers(1, p.fields("ServerLive", *fields, **pseudo)))


FIELDS = [(":method", "POST"), (":scheme", "http"), (":path", "/x"), ("te", "trailers"),
          ("content-type", "application/grpc")]  # fmt: skip

STREAM: list[tuple[str, Act, int | set[int]]] = [
    # 5.1
    ("data after the end", lambda p: ended(p).send(raw(DATA, b"x", 1)), CLOSED),
    ("headers after the end", lambda p: ended(p).send(p.headers(1)), CLOSED),
    ("trailers that do not end the stream", lambda p: opened(p).send(p.headers(1, [("a", "b")])), PROTOCOL),
    # 6.3
    ("a priority that is too short", lambda p: opened(p).send(raw(PRIORITY, bytes(4), 1)), SIZE),
    # 6.9
    ("an increment of nothing", lambda p: opened(p).send(raw(UPDATE, bytes(4), 1)), PROTOCOL),
    ("a window beyond 2 GiB", lambda p: opened(p).send(p.window(1, (1 << 31) - 1)), FLOW),
    # 8.2.1
    ("a name in upper case", with_more(("Upper", "x")), PROTOCOL),
    ("a name with a space", with_more(("a b", "x")), PROTOCOL),
    ("a name with a colon", with_more(("a:b", "x")), PROTOCOL),
    ("a name with a newline", with_more(("a\n", "x")), PROTOCOL),
    ("a name of nothing", with_more(("", "x")), PROTOCOL),
    ("a value with a newline", with_more(("a", "x\ny: z")), PROTOCOL),
    ("a value with a carriage return", with_more(("a", "x\ry")), PROTOCOL),
    ("a value with a zero", with_more(("a", "x\0y")), PROTOCOL),
    # 8.2.2
    *((f"the field {name}", with_more((name, value)), PROTOCOL) for name, value in (
        ("connection", "close"), ("keep-alive", "1"), ("proxy-connection", "x"), ("transfer-encoding", "chunked"),
        ("upgrade", "h2c"), ("te", "gzip"))),
    # 8.3
    *((f"no :{name}", with_more(**{f"_{name}": ""}), PROTOCOL) for name in ("method", "path", "scheme")),
    *((f"two of {name}", with_fields((name, value), *FIELDS), PROTOCOL) for name, value in FIELDS[:3]),
    ("an empty path", with_fields(FIELDS[0], FIELDS[1], (":path", ""), *FIELDS[3:]), PROTOCOL),
    ("a pseudo-field behind a regular one", with_fields(FIELDS[0], *FIELDS[2:], FIELDS[1]), PROTOCOL),
    ("an unknown pseudo-field", with_fields((":protocol", "x"), *FIELDS), PROTOCOL),
    ("a pseudo-field of answers", with_fields((":status", "200"), *FIELDS), PROTOCOL),
    ("a pseudo-field in trailers", lambda p: opened(p).send(p.headers(1, [(":path", "/x")], "END_STREAM")), PROTOCOL),
    ("a trailer in upper case", lambda p: opened(p).send(p.headers(1, [("Upper", "x")], "END_STREAM")), PROTOCOL),
]  # fmt: skip


@pytest.mark.parametrize(("act", "codes"), [row[1:] for row in STREAM], ids=[row[0] for row in STREAM])
def test_the_stream_and_no_other_ends_with(peer: Peer, gate: Gate, act: Act, codes: int | set[int]) -> None:
    act(peer)
    assert peer.answer(1).reset in (codes if isinstance(codes, set) else {codes})
    assert peer.ask(3).status == 0


def test_a_window_that_settings_raise_beyond_2_gib_ends_the_connection(peer: Peer) -> None:
    peer.start(1)
    peer.send(peer.window(1, 1 << 30), setting(WINDOW, (1 << 31) - 1))
    assert peer.goaway() == FLOW


BEHIND_A_REFUSAL: list[tuple[str, tuple[str, ...], list[bytes], list[int]]] = [
    ("nothing", ("END_STREAM",), [], []),
    ("what it was about to send", (), [raw(DATA, b"x", 1), raw(DATA, b"", 1, END_STREAM)], [0]),
    ("data after the end", ("END_STREAM",), [raw(DATA, b"x", 1)], [CLOSED]),
    ("data after a reset", (), [raw(RESET, bytes(4), 1), raw(DATA, b"x", 1)], [0, CLOSED]),
    ("a priority that is too short", ("END_STREAM",), [raw(PRIORITY, bytes(4), 1)], [SIZE]),
]


@pytest.mark.parametrize(
    ("flags", "frames_behind", "codes"), [row[1:] for row in BEHIND_A_REFUSAL], ids=[row[0] for row in BEHIND_A_REFUSAL]
)
def test_behind_a_request_that_is_refused_by_its_headers_comes(
    peer: Peer, flags: tuple[str, ...], frames_behind: list[bytes], codes: list[int]
) -> None:
    """It is no call of gRPC. What its client may still be sending is discarded (5.1), and nothing else is."""
    get = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "x")]
    peer.send(peer.headers(1, get, *flags), *frames_behind)
    peer.settle()
    assert [each.error_code for each in peer.seen if isinstance(each, frames.RstStreamFrame)] == codes
    assert peer.ask(3).status == 0


@pytest.mark.parametrize("code", [0, 255])
def test_a_client_that_says_farewell_and_waits_for_nothing_is_disconnected(peer: Peer, code: int) -> None:
    peer.send(raw(GOAWAY, struct.pack(">II", 0, code)))
    peer.wait_until_closed()


# --------------------------------------------------------------------- allowed frames


def test_settings_are_acknowledged_each(native: Headrace, connect: Connect) -> None:
    peer = connect(native.grpc)
    peer.send(*(frames.SettingsFrame(settings=settings) for settings in ({WINDOW: 70000}, {0xF000: 1}, {})))
    acks = 0
    while acks < 4:  # with the settings at the start of the connection
        acks += "ACK" in peer.until(frames.SettingsFrame).flags


def test_a_ping_comes_back_with_its_data(peer: Peer) -> None:
    peer.send(raw(PING, b"\0\1\2\3\4\5\6\7"))
    found = peer.until(frames.PingFrame)
    assert (found.opaque_data, set(found.flags)) == (b"\0\1\2\3\4\5\6\7", {"ACK"})


def with_table(peer: Peer, size: int) -> Peer:
    peer.encoder.header_table_size = size
    return peer


HARMLESS: list[tuple[str, Act]] = [
    ("a frame of an unknown kind", lambda p: p.send(raw(99, b"x" * 100, 0, 0xFF), raw(0xB, b"", 1))),
    ("an unknown setting", lambda p: p.send(setting(0x7777, 5))),
    ("an unknown flag", lambda p: p.send(raw(SETTINGS, b"", 0, 0x80))),
    ("a ping that was not asked for", lambda p: p.send(raw(PING, bytes(8), 0, ACK))),
    ("an acknowledgement of settings that was not asked for", lambda p: p.send(raw(SETTINGS, b"", 0, ACK))),
    ("the priority of an idle stream", lambda p: p.send(raw(PRIORITY, bytes(5), 1))),
    ("a stream that depends on itself", lambda p: p.send(raw(PRIORITY, struct.pack(">IB", 1, 3), 1))),
    ("the reserved bit of a stream", lambda p: p.send(raw(PING, bytes(8), 1 << 31))),
    ("the reserved bit of an increment", lambda p: p.send(raw(UPDATE, struct.pack(">I", 1 << 31 | 5)))),
    ("a window for a stream that has ended", lambda p: (p.ask(1), p.send(p.window(1, 5)))),
    ("a reset of a stream that has ended", lambda p: (p.ask(1), p.send(raw(RESET, bytes(4), 1)))),
    ("the priority of a stream that has ended", lambda p: (p.ask(1), p.send(raw(PRIORITY, bytes(5), 1)))),
    ("what was on its way when a stream was reset",
     lambda p: (p.start(1, "ServerLive", ("Upper", "x")), p.send(p.data(1, b"x" * 100), p.data(1, b"", "END_STREAM")))),
    ("trailers on their way when a stream was reset",
     lambda p: (p.start(1, "ServerLive", ("Upper", "x")), p.send(p.headers(1, [("a", "b")], "END_STREAM")))),
    ("more streams after a gap", lambda p: p.ask(1001 - 2)),
    ("a header table that shrinks and grows",
     lambda p: (with_table(p, 0).ask(1), with_table(p, 4096).ask(3, "ServerLive", b"", ("x-a", "b")))),
]  # fmt: skip


@pytest.mark.parametrize("act", [row[1] for row in HARMLESS], ids=[row[0] for row in HARMLESS])
def test_the_connection_goes_on_after(peer: Peer, act: Act) -> None:
    act(peer)
    assert peer.ask(1001).status == 0


def test_headers_may_come_padded_prioritised_and_in_pieces(peer: Peer) -> None:
    block = peer.block(peer.fields("ServerLive", ("x-long", "y" * 300)))
    first = b"\x07" + struct.pack(">IB", 0, 15) + block[:50] + bytes(7)
    pieces = [raw(CONTINUATION, block[at : at + 100], 1) for at in range(50, len(block), 100)]
    peer.send(raw(HEADERS, first, 1, PADDED | 0x20), *pieces, raw(CONTINUATION, b"", 1, END_HEADERS))
    peer.send(peer.data(1, peer.framed(b""), "END_STREAM"))
    assert peer.answer(1).status == 0


def test_end_of_stream_counts_though_the_headers_go_on(peer: Peer) -> None:
    block = peer.block(peer.fields())
    peer.send(raw(HEADERS, block[:20], 1, END_STREAM), raw(CONTINUATION, block[20:], 1, END_HEADERS))
    assert peer.answer(1).status != 0  # a call without a message


def test_a_client_may_end_with_trailers(peer: Peer) -> None:
    peer.start(1)
    peer.send(peer.data(1, peer.framed(b"")), peer.headers(1, [("x-checksum", "1")], "END_STREAM"))
    assert peer.answer(1).status == 0


def test_fields_that_the_table_holds_are_found_again(peer: Peer) -> None:
    for stream in (1, 3, 5):
        block = peer.block(peer.fields("ServerLive", ("x-tenant", "a"), ("x-number", str(stream))))
        assert stream == 1 or len(block) < 30
        peer.send(raw(HEADERS, block, stream, END_HEADERS), peer.data(stream, peer.framed(b""), "END_STREAM"))
        assert peer.answer(stream).status == 0


def test_a_table_that_is_full_forgets_the_oldest(peer: Peer) -> None:
    for stream in range(1, 201, 2):
        content = ("x-wanders", f"{stream}" * 30)
        assert peer.ask(stream, "ServerLive", b"", content, ("x-stays", "a")).status == 0


def test_huffman_codes_are_read(peer: Peer) -> None:
    block = peer.encoder.encode(peer.fields("ServerLive", ("x-text", "~with {all} kinds^")), huffman=True)
    peer.send(raw(HEADERS, block, 1, END_HEADERS), peer.data(1, peer.framed(b""), "END_STREAM"))
    assert peer.answer(1).status == 0


@pytest.mark.parametrize("frame_bytes", [1 << 14, 20_000, (1 << 24) - 1])
def test_frames_are_no_larger_than_the_client_takes(native: Headrace, connect: Connect, frame_bytes: int) -> None:
    peer = connect(native.grpc, {FRAME_BYTES: frame_bytes, WINDOW: 1 << 22})
    peer.send(peer.window(0, 1 << 22))
    sent = _pieces(peer, 1, peer.framed(peer.infer(content=bytes(200_000))))
    peer.start(1, "ModelInfer")
    peer.send(*sent)
    assert len(peer.answer(1).message) > 200_000
    assert max(frame.body_len for frame in peer.seen) <= frame_bytes


def _pieces(peer: Peer, stream: int, content: bytes) -> list[Any]:
    size = 1 << 14
    cuts = [content[at : at + size] for at in range(0, len(content), size)]
    return [peer.data(stream, cut, *(["END_STREAM"] if cut is cuts[-1] else [])) for cut in cuts]


def test_answers_of_many_streams_come_as_they_are_ready(peer: Peer, gate: Gate) -> None:
    peer.call(1, "ModelInfer", peer.infer("slow"))
    gate.wait_until_running()
    assert peer.ask(3).status == 0
    assert not peer.answers[1].ended if 1 in peer.answers else True
    gate.open()
    assert peer.answer(1).status == 0


def test_streams_beyond_the_limit_are_refused(peer: Peer, gate: Gate) -> None:
    (settings,) = [f.settings for f in peer.seen if isinstance(f, frames.SettingsFrame) and "ACK" not in f.flags]
    limit = settings[CONCURRENT]
    for number in range(limit + 1):
        peer.start(2 * number + 1)
    assert peer.answer(2 * limit + 1).reset == REFUSED
    peer.send(peer.data(1, peer.framed(b""), "END_STREAM"))
    assert peer.answer(1).status == 0
    assert peer.ask(2 * limit + 3).status == 0  # there is room again


def test_a_client_that_says_farewell_gets_its_answers(peer: Peer, gate: Gate) -> None:
    peer.call(1, "ModelInfer", peer.infer("slow"))
    gate.wait_until_running()
    peer.send(frames.GoAwayFrame(0, 0, NO_ERROR))
    gate.open()
    assert peer.answer(1).status == 0


def test_nobodys_error_disturbs_another_connection(native: Headrace, connect: Connect, peer: Peer, gate: Gate) -> None:
    peer.call(1, "ModelInfer", peer.infer("slow"))
    gate.wait_until_running()
    other = connect(native.grpc)
    other.send(raw(PING, bytes(3)))
    assert other.goaway() == SIZE
    gate.open()
    assert peer.answer(1).status == 0
