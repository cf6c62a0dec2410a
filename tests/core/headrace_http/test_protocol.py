"""HTTP/1.1 byte by byte, against a transport that writes into a list. No sockets, no clock."""

from __future__ import annotations

import gc
import re
import select
import socket
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from headrace_http.message import HttpReply

MIB = 1024 * 1024


Connect = Callable[..., Any]


def post(path: str, body: bytes, *headers: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in headers)
    return f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


CHUNKS = b"POST /slow HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + b"3e8\r\n%s\r\n" % bytes(1000) * 200
CHUNKS += b"0\r\n\r\n"


def test_small_reply_is_one_write(connect: Connect) -> None:
    peer = connect()
    peer.send(post("/a?q=1", b"hello", "X-Y: z"))
    (request,) = peer.requests
    assert (request.method, request.path, bytes(request.body)) == ("POST", "/a", b"hello")
    assert request.headers[b"x-y"] == b"z"
    assert (b"X-Y", b"z") in request.raw_headers
    assert peer.wire.written == [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n/a"]


@pytest.mark.parametrize("step", [1, 2, 7, 64])
def test_requests_may_arrive_in_pieces(connect: Connect, step: int) -> None:
    peer = connect()
    peer.send(post("/one", b"12345") + b"GET /two HTTP/1.1\r\nHost: h\r\n\r\n" + post("/three", b"x"), step)
    assert [(r.method, r.path, bytes(r.body)) for r in peer.requests] == [
        ("POST", "/one", b"12345"),
        ("GET", "/two", b""),
        ("POST", "/three", b"x"),
    ]
    assert peer.statuses == [200, 200, 200]


def test_pipelined_requests_are_executed_one_after_the_other(connect: Connect) -> None:
    """As in Triton: bytes after a request wait, unread in the socket beyond those received with it."""
    peer = connect()
    peer.holds = True
    peer.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number for number in range(4)))
    for number in range(4):
        assert [request.path for request in peer.requests] == [f"/{each}" for each in range(number + 1)]
        assert peer.wire.reads == (number == 3)
        peer.replies[number](HttpReply(200, (), (b"<%d>" % number,)))
    assert re.findall(rb"<\d>", peer.answer) == [b"<0>", b"<1>", b"<2>", b"<3>"]
    assert peer.wire.reads


@pytest.mark.parametrize("pieces", [1, 2], ids=["together", "later"])
def test_the_next_request_is_not_executed_before_the_answer_is_taken(connect: Connect, pieces: int) -> None:
    peer = connect()
    request = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
    peer.holds = True
    for piece in (request * 2,) if pieces == 1 else (request, request):
        peer.send(piece)
    peer.wire.fills = peer.protocol  # as of a transport whose caller does not read a large answer
    peer.replies[0](HttpReply(200, (), (bytes(100_000),)))
    peer.take_turns()
    assert len(peer.requests) == 1
    peer.protocol.resume_writing()
    peer.send(b"")
    assert len(peer.requests) == 2


def test_second_reply_is_ignored(connect: Connect) -> None:
    peer = connect()
    peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    peer.replies[0](HttpReply(500))
    assert peer.statuses == [200]


@pytest.mark.parametrize("step", [1 << 30, 1000])
@pytest.mark.parametrize("json_bytes", [0, 1, 63, 100])
def test_tensors_of_a_large_body_are_aligned_and_whole(connect: Connect, json_bytes: int, step: int) -> None:
    body = bytes(range(256)) * 1024
    peer = connect()
    peer.send(post("/v2/models/m/infer", body, f"Inference-Header-Content-Length: {json_bytes}") * 2, step)
    import numpy as np

    for request in peer.requests:
        assert bytes(request.body) == body
        address = np.frombuffer(request.body, np.uint8).ctypes.data
        assert (address + json_bytes) % 64 == 0
    assert peer.statuses == [200, 200]


def test_large_body_is_received_without_a_copy(connect: Connect) -> None:
    peer = connect()
    head = post("/v2/models/m/infer", b"", "Inference-Header-Content-Length: 9").replace(b": 0", b": 16777216")
    peer.send(head)
    first = peer.protocol.get_buffer(-1)
    assert len(first) == MIB  # announcing takes no memory
    first[-1] = 6
    peer.protocol.buffer_updated(MIB)
    target = peer.protocol.get_buffer(-1)
    assert len(target) == 15 * MIB
    target[-1] = 7
    peer.protocol.buffer_updated(15 * MIB)
    (request,) = peer.requests
    target[-1] = 8
    assert request.body[-1] == 8
    assert request.body[MIB - 1] == 6


@pytest.mark.parametrize("path", ["/v2/repository/models/m/load", "/v2/repository/index", "/v2/models/m/ready"])
def test_body_beyond_32_bits_is_too_large_and_not_unreadable_where_nothing_reads_its_length(
    connect: Connect, path: str
) -> None:
    peer = connect()
    peer.send(post(path, b"").replace(b": 0", b": 2800000000"))
    assert peer.statuses == [400]
    assert b"request JSON size of 2800000000 bytes exceeds the maximum allowed input size of 67108864 bytes" in (
        peer.answer
    )


def test_large_parts_are_written_uncopied(connect: Connect) -> None:
    peer = connect()
    peer.holds = True
    peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    part = memoryview(bytes(MIB))
    peer.replies[0](HttpReply(200, (), (b"{}", part)))
    assert any(written is part for written in peer.wire.written)
    assert peer.answer.startswith(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n{}" % (MIB + 2))


def test_chunked_body_is_put_together_and_its_trailers_ignored(connect: Connect) -> None:
    peer = connect()
    peer.send(
        b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n2;e=1\r\nde\r\n0\r\nA: b\r\n\r\n",
        1,
    )
    (request,) = peer.requests
    assert bytes(request.body) == b"abcde"
    assert b"a" not in request.headers


def test_flood_of_tiny_chunks_is_refused(connect: Connect) -> None:
    peer = connect()
    peer.send(b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 65536)
    assert not peer.answer
    peer.send(b"1\r\nx\r\n")
    assert peer.statuses == [400]
    assert b"Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks." in (
        peer.answer
    )
    assert b"Connection: close" in peer.answer
    assert not peer.requests


def test_one_chunk_in_many_reads_is_one_chunk(connect: Connect) -> None:
    peer = connect(chunks=1)
    peer.send(
        b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n" + b"x" * 100 + b"\r\n0\r\n\r\n", 1
    )
    assert peer.statuses == [200]


def test_announced_terabyte_allocates_nothing_and_is_refused(connect: Connect) -> None:
    peer = connect()
    head = post("/v2/models/m/infer", b"", "Inference-Header-Content-Length: 9").replace(b": 0", b": 1099511627776")
    peer.send(head)
    assert peer.statuses == [400]
    assert peer.protocol.get_buffer(-1) is peer.connections.buffer
    assert b"value is out of range" in peer.answer


@pytest.mark.parametrize(
    ("headers", "size", "status"),
    [
        ([], 100_000, 200),
        ([], 100_001, 400),
        (["Inference-Header-Content-Length: 0"], 100_001, 400),
        (["Inference-Header-Content-Length: 5"], 100_001, 200),
        (["Inference-Header-Content-Length: 5", "Content-Encoding: gzip"], 100_001, 400),
    ],
)
def test_only_binary_tensors_may_exceed_the_input_size(
    connect: Connect, headers: list[str], size: int, status: int
) -> None:
    peer = connect(input_bytes=100_000)
    peer.send(post("/v2/models/m/infer", b"x" * size, *headers))
    assert peer.statuses == [status]


def test_chunked_body_beyond_the_limit_is_refused_when_it_gets_there(connect: Connect) -> None:
    peer = connect(input_bytes=100_000)
    peer.send(b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(4):
        peer.send(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
    assert peer.statuses == [400]


def test_refused_caller_may_go_on_sending_and_reads_the_refusal(connect: Connect) -> None:
    peer = connect(input_bytes=1000)
    peer.send(post("/c", b"x" * 500_000))
    assert peer.statuses == [400]
    assert peer.wire.has_eof
    for _ in range(31):
        assert not peer.wire.is_closed
        peer.protocol.sweep()
    assert peer.wire.is_closed


@pytest.mark.parametrize(
    "data",
    [
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -3\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked, gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nA: b\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nA : b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nA: b\nB: c\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello",
        b"POST * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_ambiguous_or_malformed_request_is_refused_and_the_connection_closed(connect: Connect, data: bytes) -> None:
    peer = connect()
    peer.send(data + b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n")
    assert peer.statuses[0] in (400, 505)
    assert len(peer.statuses) == 1
    assert not peer.requests
    assert peer.wire.has_eof or peer.wire.is_closed


@pytest.mark.parametrize("step", [100, 18])
def test_a_client_of_http_2_is_told_to_speak_http_1(connect: Connect, step: int) -> None:
    """It gets SETTINGS, and RST_STREAM of its first request with HTTP_1_1_REQUIRED (RFC 9113, 6.4 and 7)."""
    peer = connect()
    peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", step)
    assert peer.answer == bytes.fromhex("000000040000000000" + "00000403000000000100" + "00000d")
    assert not peer.requests
    assert not peer.wire.has_eof


def test_head_beyond_its_size_is_refused(connect: Connect) -> None:
    peer = connect()
    peer.send(b"GET / HTTP/1.1\r\nHost: h\r\nA: " + b"x" * 70_000, 1000)
    assert peer.statuses == [431]


def test_too_many_headers_are_refused(connect: Connect) -> None:
    peer = connect()
    peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n" + b"A: b\r\n" * 129 + b"\r\n")
    assert peer.statuses == [431]


def test_endless_trailer_is_refused(connect: Connect) -> None:
    peer = connect()
    peer.send(
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nA: " + b"x" * 70_000, 1000
    )
    assert peer.statuses == [431]


def test_unknown_method_is_the_routes_to_refuse(connect: Connect) -> None:
    peer = connect()
    peer.send(b"FROB /v2 HTTP/1.1\r\nHost: h\r\n\r\n")
    assert peer.requests[0].method == "FROB"


def test_head_request_is_answered_without_a_body(connect: Connect) -> None:
    peer = connect()
    peer.send(b"HEAD /v2 HTTP/1.1\r\nHost: h\r\n\r\n")
    assert peer.answer == b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n"


def test_expect_is_answered_before_the_body(connect: Connect) -> None:
    peer = connect()
    head, body = post("/a", b"hello", "Expect: 100-continue").split(b"\r\n\r\n")
    peer.send(head + b"\r\n\r\n")
    assert peer.answer == b"HTTP/1.1 100 Continue\r\n\r\n"
    peer.send(body)
    assert peer.statuses == [100, 200]


def test_refused_body_is_not_asked_for(connect: Connect) -> None:
    peer = connect(input_bytes=10)
    peer.send(post("/a", b"x" * 70_000, "Expect: 100-continue").removesuffix(b"x" * 70_000))
    assert peer.statuses == [400]


def test_upgrade_is_ignored(connect: Connect) -> None:
    peer = connect()
    peer.send(
        b"GET /a HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nGET /b HTTP/1.1\r\nHost: h\r\n\r\n"
    )
    assert [request.path for request in peer.requests] == ["/a", "/b"]


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    ],
)
def test_connection_is_closed_behind_the_last_answer(connect: Connect, head: bytes) -> None:
    peer = connect()
    peer.send(head + b"GET /more HTTP/1.1\r\nHost: h\r\n\r\n")
    assert peer.statuses == [200]
    assert b"Connection: close\r\n" in peer.answer
    assert peer.wire.has_eof
    assert not peer.protocol.eof_received()


def test_path_of_an_absolute_target(connect: Connect) -> None:
    peer = connect()
    peer.send(b"GET http://host/v2?x HTTP/1.1\r\nHost: h\r\n\r\n")
    assert peer.requests[0].path == "/v2"


def test_lost_connection_cancels_what_is_unanswered(connect: Connect) -> None:
    peer = connect()
    peer.holds = True
    peer.send(b"GET /0 HTTP/1.1\r\nHost: h\r\n\r\nGET /1 HTTP/1.1\r\nHost: h\r\n\r\n")
    peer.protocol.connection_lost(None)
    assert peer.cancelled == [0]
    peer.replies[0](HttpReply(200))
    assert not peer.answer
    assert len(peer.requests) == 1


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
def test_memory_of_a_request_is_counted_until_its_answer(connect: Connect, chunked: bool) -> None:
    peer, size = connect(), 200_000
    ledger, body = peer.connections.held, post("/", bytes(size))
    if chunked:
        body = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (
            size,
            bytes(size),
        )
    peer.holds = True
    peer.send(body[:-1000])
    assert size - 2000 < ledger.total_bytes < size
    peer.send(body[-1000:])
    assert ledger.total_bytes == size
    peer.replies[0](HttpReply(200))
    assert ledger.total_bytes == 0


@pytest.mark.parametrize("ending", ["lost", "answered late"])
def test_memory_of_an_answer_is_counted_until_it_is_written(connect: Connect, ending: str) -> None:
    peer = connect()
    ledger = peer.connections.held
    peer.holds = True
    peer.send(post("/", bytes(100_000)))
    peer.wire.fills, peer.wire.unsent = peer.protocol, 70_000
    if ending == "answered late":
        peer.protocol.pause_writing()
    else:
        peer.replies[0](HttpReply(200, (), (bytes(100_000),)))
    peer.protocol.sweep()
    if ending == "answered late":
        assert ledger.total_bytes == 70_000 + 100_000  # the unsent bytes of an earlier answer, and the request
    else:
        assert ledger.total_bytes == len(peer.answer) > 100_000  # whole: its memory stays until the last byte is sent
    peer.wire.unsent = 0
    peer.protocol.connection_lost(None)
    peer.take_turns()
    peer.replies[0](HttpReply(200))
    assert ledger.total_bytes == 0


def test_reading_pauses_while_the_caller_does_not_read(connect: Connect) -> None:
    peer = connect()
    peer.protocol.pause_writing()
    assert not peer.wire.reads
    peer.protocol.resume_writing()
    assert peer.wire.reads


@pytest.mark.parametrize(
    "data", [b"GET /slow HTT", post("/slow", b"x" * 100)[:-50], post("/slow", b"x" * 100_000)[:-50]]
)
def test_request_that_stops_arriving_is_given_up(connect: Connect, data: bytes) -> None:
    peer = connect()
    peer.send(data)
    limit = 60 if data.startswith(b"GET") else 31
    for _ in range(limit):
        peer.protocol.sweep()
        assert not peer.answer
    peer.protocol.sweep()
    assert peer.statuses == [408]


def test_head_that_drips_is_given_up(connect: Connect) -> None:
    peer = connect()
    peer.send(b"GET /slow")
    for _ in range(61):
        assert not peer.answer
        peer.send(b"w")
        peer.protocol.sweep()
    assert peer.statuses == [408]


def test_body_that_drips_is_given_up(connect: Connect) -> None:
    peer = connect()
    peer.send(post("/slow", b"x" * 1000)[:-1000])
    for _ in range(32):
        assert not peer.answer
        peer.send(b"x")
        peer.protocol.sweep()
    assert peer.statuses == [408]


@pytest.mark.parametrize("body", [post("/slow", b"x" * 200_000), CHUNKS], ids=["known length", "chunks"])
def test_slow_body_is_received_for_as_long_as_it_keeps_to_the_rate(connect: Connect, body: bytes) -> None:
    """Thrice the time that a body may stand still: in bursts, and with pauses that the bursts have paid for."""
    peer = connect(min_data_rate=1000)
    for begin in range(0, len(body), 20_000):
        peer.send(body[begin : begin + 20_000])
        for _ in range(20):
            assert not peer.answer or begin + 20_000 >= len(body)
            peer.protocol.sweep()
    assert peer.statuses == [200]


def test_silent_connection_is_closed_soon_and_an_idle_one_later(connect: Connect) -> None:
    silent, idle = connect(), connect()
    idle.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    for second in range(622):
        assert silent.wire.is_closed == (second > 60)
        assert idle.wire.is_closed == (second > 620)
        silent.protocol.sweep()
        idle.protocol.sweep()
    assert idle.wire.is_closed


def test_zero_is_for_ever(connect: Connect) -> None:
    limits = {"header_timeout_s": 0, "keepalive_timeout_s": 0, "min_data_rate": 0}
    peers = [connect(**limits) for _ in range(3)]
    peers[1].send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    peers[2].send(post("/slow", b"x" * 1000)[:-1])
    for _ in range(10_000):
        for peer in peers:
            peer.protocol.sweep()
    assert not any(peer.wire.is_closed or peer.wire.has_eof for peer in peers)


def test_answer_that_is_not_read_ends_the_connection(connect: Connect) -> None:
    peer = connect()
    peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    peer.wire.unsent = 1 << 26
    peer.protocol.pause_writing()
    for second in range(32):
        assert not peer.wire.is_closed
        peer.wire.unsent -= second  # bytes, and not kilobytes
        assert not peer.released
        peer.protocol.sweep()
    assert peer.wire.is_closed
    assert peer.released == 1


def test_answer_that_is_read_slowly_is_waited_for(connect: Connect) -> None:
    peer = connect()
    peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    peer.wire.unsent = 1 << 20
    peer.protocol.pause_writing()
    while peer.wire.unsent:
        peer.wire.unsent -= 2048
        peer.protocol.sweep()
    assert not peer.wire.is_closed


def test_answers_wait_while_the_caller_does_not_read(connect: Connect) -> None:
    peer = connect()
    peer.holds = True
    peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    peer.protocol.pause_writing()
    peer.replies[0](HttpReply(200))
    assert not peer.answer
    peer.protocol.resume_writing()
    assert peer.statuses == [200]


def test_caller_who_closes_its_side_is_answered_and_the_connection_closed(connect: Connect) -> None:
    peer = connect()
    peer.holds = True
    peer.send(b"GET /0 HTTP/1.1\r\nHost: h\r\n\r\nGET /1 HTTP/1.1\r\nHost: h\r\n\r\nGET /half")
    peer.replies[0](HttpReply(200, (), (b"whole",)))
    peer.wire.reads = True  # the last is unanswered, and the received part of the next is dropped with the rest
    assert peer.protocol.eof_received()
    peer.replies[1](HttpReply(200, (), (b"whole",)))
    first, second = peer.answer.split(b"whole")[:2]
    assert first == b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    assert second == b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\n"
    assert peer.wire.is_closed


@pytest.mark.parametrize("leaves", [True, False], ids=["gone", "half"])
def test_caller_who_has_gone_altogether_is_noticed_before_the_next_sweep(connect: Connect, leaves: bool) -> None:
    """A client that has only half-closed is answered. Real sockets: only the kernel distinguishes the two."""
    peer = connect()
    peer.holds = True
    peer.send(b"GET /0 HTTP/1.1\r\nHost: h\r\n\r\n")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        caller = socket.create_connection(listening.getsockname())
        peer.wire.socket, _ = listening.accept()
    with caller, peer.wire.socket:
        caller.close() if leaves else caller.shutdown(socket.SHUT_WR)
        assert peer.protocol.eof_received()
        if leaves:  # the reset arrives at once here, or nearly
            poll = select.poll()
            poll.register(peer.wire.socket, select.POLLERR)
            assert poll.poll(90_000)
        waited_s = 0.0
        while peer.later:
            delay_s, look = peer.later.pop()
            waited_s += delay_s
            look()
        assert peer.wire.is_closed is leaves
        assert waited_s <= 0.01 if leaves else 1 < waited_s < 2


def test_connection_is_not_checked_after_the_last_answer(connect: Connect) -> None:
    peer = connect()
    peer.holds = True
    peer.send(b"GET /0 HTTP/1.1\r\nHost: h\r\n\r\n")
    assert peer.protocol.eof_received()
    peer.replies[0](HttpReply(200))
    ((_, look),) = peer.later
    peer.later.clear()
    look()
    assert not peer.later


def test_idle_caller_who_closes_its_side_has_gone(connect: Connect) -> None:
    peer = connect()
    peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\nGET /half")
    assert not peer.protocol.eof_received()


@pytest.mark.parametrize("rest", [b"", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n"])
def test_a_thousand_requests_in_one_read_are_answered_in_turns(connect: Connect, rest: bytes) -> None:
    request, peer = b"GET / HTTP/1.1\r\nHost: h\r\n" + rest + b"\r\n", connect()

    peer.takes_turns = False
    peer.send(request * (65536 // len(request)))
    for turn in range(1, 4):
        assert len(peer.requests) == 8 * turn
        assert not peer.wire.reads
        peer.turns.pop(0)()
    peer.takes_turns = True
    peer.take_turns()
    assert peer.statuses == [200] * (65536 // len(request))
    assert peer.wire.reads


def test_slow_model_is_not_a_slow_caller(connect: Connect) -> None:
    peer = connect()
    peer.holds = True
    peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    for _ in range(100):
        peer.protocol.sweep()
    assert not peer.wire.is_closed


def test_stopping_answers_what_is_in_flight(connect: Connect) -> None:
    idle, busy = connect(), connect()
    idle.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    busy.holds = True
    busy.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    idle.protocol.stop()
    busy.protocol.stop()
    assert idle.protocol.is_idle
    assert not busy.protocol.is_idle
    busy.replies[0](HttpReply(200))
    assert b"Connection: close" in busy.answer
    assert busy.wire.is_closed


def test_stopping_waits_for_a_request_that_is_arriving(connect: Connect) -> None:
    peer = connect()
    request = post("/a", b"hello")
    peer.send(request[:-2])
    peer.protocol.stop()
    assert not peer.wire.is_closed
    peer.send(request[-2:])
    assert peer.statuses == [200]
    assert peer.wire.is_closed


@pytest.mark.parametrize("holds", [False, True])
def test_tensors_are_freed_with_the_answer_and_not_by_the_collector(
    connect: Connect, make_caller: Callable[..., Any], holds: bool
) -> None:
    caller, peer = make_caller({"X": ("UINT8", (-1,))}), connect()
    caller.model.holds = holds
    peer.protocol.dispatch = caller.routes.dispatch
    tensor_json = b'{"name":"X","datatype":"UINT8","shape":[300000],"parameters":{"binary_data_size":300000}}'
    text = b'{"parameters":{"binary_data_output":true},"inputs":[' + tensor_json + b"]}"
    gc.disable()
    try:
        peer.send(post("/v2/models/echo/infer", text + bytes(300_000), f"Inference-Header-Content-Length: {len(text)}"))
        request = caller.model.requests.pop()
        tensor = weakref.ref(request.inputs["X"])
        if holds:
            caller.model.answer(caller.model.tickets.pop())
        assert peer.statuses == [200]
        peer.wire.written.clear()
        del request
        assert tensor() is None
    finally:
        gc.enable()
