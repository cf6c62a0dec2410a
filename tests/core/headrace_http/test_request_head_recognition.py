"""Requests whose head was read before. The oracle is a connection with an empty head cache."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.option_parts import Restriction
from headrace_http.message import Cancel, HttpReply, HttpRequest, Reply
from headrace_http.routes import Routes

Connect = Callable[..., Any]
MakeCaller = Callable[..., Any]


def head_of(path: str, size: int, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers)
    return f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {size}\r\n{lines}\r\n".encode()


HEAD = head_of("/known", 5)
GET = b"GET /got HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.fixture
def peer(connect: Connect) -> Any:
    """A connection that has had one request with `HEAD`, and one with `GET`."""
    known = connect()
    known.send(HEAD + b"first")
    known.send(GET)
    return known


def took(peer: Any) -> list[tuple[str, str, bytes]]:
    """Return the requests that were dispatched after the two of the fixture."""
    return [(request.method, request.path, bytes(request.body)) for request in peer.requests[2:]]


def is_parsed(request: HttpRequest, peer: Any) -> bool:
    """Return True if the head of ``request`` was parsed, and no earlier one was reused."""
    return all(request.headers is not earlier.headers for earlier in peer.requests if earlier is not request)


def sweep(peer: Any, times: int) -> None:
    for _ in range(times):
        peer.protocol.sweep()


# ---------------------------------------------------------------------------------------- recognised requests


@pytest.mark.parametrize("step", [1 << 30, len(HEAD)], ids=["in one read", "head and body"])
def test_known_head_and_a_whole_body_are_not_parsed(peer: Any, step: int) -> None:
    peer.send(HEAD + b"again", step)
    assert took(peer) == [("POST", "/known", b"again")]
    assert not is_parsed(peer.requests[-1], peer)
    assert peer.requests[-1].raw_headers == peer.requests[0].raw_headers
    assert peer.statuses == [200, 200, 200]


def test_known_head_without_body_is_not_parsed(peer: Any) -> None:
    peer.send(GET)
    assert took(peer) == [("GET", "/got", b"")]
    assert not is_parsed(peer.requests[-1], peer)


def test_head_is_known_to_every_connection(connect: Connect, peer: Any) -> None:
    other = connect(peer)
    other.send(HEAD + b"other")
    peer.send(HEAD + b"again")
    assert bytes(other.requests[0].body) == b"other"
    assert other.requests[0].headers is peer.requests[0].headers
    assert took(peer) == [("POST", "/known", b"again")]


def test_connections_take_turns_with_heads_and_bodies(connect: Connect, peer: Any) -> None:
    """The receive buffer is everybody's; what one has received is not to be seen in another's body."""
    others = [connect(peer) for _ in range(3)]
    for other in others:
        other.holds = True
        other.send(HEAD)
    for number, other in enumerate(others):
        other.send(b"body%d" % number)
    assert [bytes(other.requests[0].body) for other in others] == [b"body0", b"body1", b"body2"]
    others[0].send(HEAD + b"later")
    assert bytes(others[2].requests[0].body) == b"body2"


def test_held_bodies_of_one_connection_stay_apart(peer: Any) -> None:
    peer.holds = True
    for number in range(10):
        peer.send(HEAD + b"body%d" % number)
    for number in range(10):
        assert [body for _, _, body in took(peer)] == [b"body%d" % each for each in range(number + 1)]
        peer.replies[-1](HttpReply(200))
        peer.send(b"")


def test_alternating_requests_are_told_apart(peer: Any) -> None:
    other = head_of("/other", 3, "X: y")
    for _ in range(3):
        peer.send(other + b"abc")
        peer.send(HEAD + b"hello")
        peer.send(GET)
    assert took(peer) == [("POST", "/other", b"abc"), ("POST", "/known", b"hello"), ("GET", "/got", b"")] * 3
    assert not is_parsed(peer.requests[-3], peer)
    assert peer.statuses == [200] * 11


# ---------------------------------------------------------------------------------------- what the parser gets


@pytest.mark.parametrize("cut", range(1, 5))
@pytest.mark.parametrize("prefix", [0, 1], ids=["head apart", "with the head"])
def test_body_in_pieces_is_put_together(peer: Any, cut: int, prefix: int) -> None:
    first = HEAD + b"again"[: cut * prefix]
    peer.send(first)
    if prefix == 0:
        peer.send(b"again"[:cut])
    assert not took(peer)
    peer.send(b"again"[cut:])
    assert took(peer) == [("POST", "/known", b"again")]
    peer.send(HEAD + b"after")
    assert took(peer)[1:] == [("POST", "/known", b"after")]


def test_body_byte_by_byte(peer: Any) -> None:
    peer.send(HEAD)
    peer.send(b"again", 1)
    assert took(peer) == [("POST", "/known", b"again")]


@pytest.mark.parametrize("cut", [len(HEAD), len(HEAD) + 5, 1 << 30])
def test_pipelined_requests_are_all_taken(peer: Any, cut: int) -> None:
    data = HEAD + b"again" + HEAD + b"third" + GET + GET + HEAD
    peer.send(data[:cut])
    peer.send(data[cut:])
    peer.send(b"tail.")
    bodies = [("POST", "/known", b"again"), ("POST", "/known", b"third")]
    assert took(peer) == [*bodies, ("GET", "/got", b""), ("GET", "/got", b""), ("POST", "/known", b"tail.")]
    assert peer.statuses == [200] * 7


def test_body_longer_than_announced_is_the_next_request(peer: Any) -> None:
    peer.send(HEAD + b"again!!")
    assert took(peer) == [("POST", "/known", b"again")]
    peer.send(b"\r\n\r\n")
    assert peer.statuses == [200, 200, 200, 400]
    assert peer.wire.has_eof


def test_body_longer_than_announced_behind_a_head_that_came_alone(peer: Any) -> None:
    peer.send(HEAD)
    peer.send(b"again!!")
    peer.send(b"\r\n\r\n")
    assert took(peer) == [("POST", "/known", b"again")]
    assert peer.statuses == [200, 200, 200, 400]


def test_body_shorter_than_announced_is_waited_for(peer: Any) -> None:
    peer.send(HEAD + b"aga")
    assert not took(peer)
    peer.send(b"in")
    assert took(peer) == [("POST", "/known", b"again")]


@pytest.mark.parametrize("lines", [b"\r\n", b"\r\n\r\n", b"\r\n" * 5])
def test_empty_lines_between_requests_mean_nothing(connect: Connect, lines: bytes) -> None:
    peer = connect()
    for _ in range(3):
        peer.send(lines + HEAD + b"hello")
        peer.send(HEAD + b"hello")
        peer.send(lines)
        peer.send(HEAD)
        peer.send(b"hello" + lines)
    assert [bytes(request.body) for request in peer.requests] == [b"hello"] * 9
    assert peer.statuses == [200] * 9


@pytest.mark.parametrize("size", [1, 2, 5, len(GET)])
def test_empty_lines_in_front_of_a_request_do_not_become_a_request(connect: Connect, size: int) -> None:
    peer = connect()
    peer.send(b"\r\n\r\n" + GET[:size])
    peer.send(GET[size:])
    assert len(peer.requests) == 1
    peer.send(b"\r\n\r\n")
    other = connect(peer)
    other.send(b"\r\n\r\n")
    assert len(peer.requests) == 1
    assert not other.requests


def test_any_number_of_empty_lines_may_come_between_known_requests(peer: Any) -> None:
    """Each is bounded with its own request, and does not add up to a head that is too long."""
    for _ in range(70):
        peer.send(b"\r\n" * 512)
        peer.send(GET)
    assert peer.statuses == [200] * 72


UNUSUAL = {
    "close": b"GET /u HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
    "proxy": b"GET /u HTTP/1.1\r\nHost: h\r\nProxy-Connection: close\r\n\r\n",
    "1.0": b"GET /u HTTP/1.0\r\n\r\n",
    "1.0 kept alive": b"GET /u HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    "0.9": b"GET /u\r\n\r\n",
    "expect": head_of("/u", 5, "Expect: 100-continue") + b"hello",
    "expect else": head_of("/u", 5, "Expect: nothing") + b"hello",
    "chunked": b"POST /u HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "upgrade": b"GET /u HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    "upgrade with a body": head_of("/u", 5, "Connection: upgrade", "Upgrade: x") + b"hello",
    "upgrade unasked": head_of("/u", 5, "Upgrade: x") + b"hello",
    "connect": b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n",
    "head": b"HEAD /u HTTP/1.1\r\nHost: h\r\n\r\n",
    "head with a body": b"HEAD /u HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nab",
    "get with a body": b"GET /u HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nab",
    "absolute": b"GET http://h/u?q HTTP/1.1\r\nHost: h\r\n\r\n",
    "large": head_of("/u", 70_000) + b"x" * 70_000,
    "long": b"GET /u HTTP/1.1\r\nHost: h\r\nA: " + b"x" * 2000 + b"\r\n\r\n",
    "many headers": b"GET /u HTTP/1.1\r\nHost: h\r\n" + b"A:b\r\n" * 129 + b"\r\n",
    "repeated header": b"GET /u HTTP/1.1\r\nHost: h\r\nA: b\r\nA: c\r\n\r\n",
    "unknown method": b"FROB /u HTTP/1.1\r\nHost: h\r\n\r\n",
    "two lengths": b"POST /u HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "space in front of a colon": b"GET /u HTTP/1.1\r\nHost: h\r\nA : b\r\n\r\n",
}


@pytest.mark.parametrize("apart", [False, True], ids=["in one read", "head and body"])
@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
def test_repeated_request_is_answered_as_the_first_time(connect: Connect, data: bytes, apart: bool) -> None:
    peers = [connect()]
    peers += [connect(peers[0]) for _ in range(3)]
    for peer in peers:
        end = data.index(b"\r\n\r\n") + 4 if apart else 1 << 30
        for piece in (data[:end], data[end:], GET, data):
            peer.send(piece)
    first = peers[0]
    for peer in peers[1:]:
        assert peer.answer == first.answer
        assert (peer.wire.is_closed, peer.wire.has_eof) == (first.wire.is_closed, first.wire.has_eof)
        assert [request[:4] for request in peer.requests] == [request[:4] for request in first.requests]


def test_expected_continue_is_sent_each_time(connect: Connect) -> None:
    peer = connect()
    for _ in range(3):
        peer.send(head_of("/u", 5, "Expect: 100-continue"))
        peer.send(b"hello")
    assert peer.statuses == [100, 200] * 3


def test_large_body_behind_a_repeated_head_is_received_in_its_own_memory(connect: Connect) -> None:
    peer = connect()
    for _ in range(3):
        peer.send(head_of("/u", 100_000))
        assert len(peer.protocol.get_buffer(-1)) == 100_000
        peer.send(b"x" * 100_000)
    assert peer.statuses == [200] * 3


def test_largest_body_that_fits_one_read_is_recognised(connect: Connect) -> None:
    peer = connect()
    head = head_of("/u", 65536)
    for fill in (b"a", b"b", b"c"):
        peer.send(head)
        peer.send(fill * 65536)
    assert [bytes(request.body[:1]) for request in peer.requests] == [b"a", b"b", b"c"]
    assert peer.requests[2].headers is peer.requests[0].headers


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/nowhere", b"{}", (), 404),
        ("/v2/health/live", b"", (), 405),
        ("/v2/models/echo/infer", b"{}", (), 500),
        ("/v2/models/none/infer", b"{}", (), 404),
        ("/v2/models/echo/infer", b"{}abcd", ("Inference-Header-Content-Length: 7",), 400),
        ("/v2/models/echo/infer", b"{}", ("Content-Encoding: br",), 501),
        ("/v2/models/echo/infer", b" " * 101, (), 400),
    ],
)
def test_refused_request_is_refused_again(
    connect: Connect, make_caller: MakeCaller, path: str, body: bytes, headers: tuple[str, ...], status: int
) -> None:
    peer = connect()
    peer.protocol.dispatch = make_caller({"X": ("UINT8", (4,))}, http_max_input_size=100).routes.dispatch
    for _ in range(3):
        peer.send(head_of(path, len(body), *headers) + body)
    assert peer.statuses == [status] * 3
    first, second, third = (bytes(reply) for reply in peer.wire.written)
    assert first == second == third


def test_restricted_request_needs_its_key_each_time(connect: Connect, make_caller: MakeCaller) -> None:
    caller = make_caller({"X": ("UINT8", (4,))}, http_restricted_api={"health": Restriction("key", "secret")})
    peers = [connect()]
    peers += [connect(peers[0]) for _ in range(2)]
    for peer in peers:
        peer.protocol.dispatch = caller.routes.dispatch
        for headers in (b"", b"key: secret\r\n", b"key: guess\r\n"):
            peer.send(b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n" + headers + b"\r\n")
        assert peer.statuses == [403, 200, 403]


# ---------------------------------------------------------------------------------------- smuggling


def test_body_that_is_a_known_head_is_a_body(connect: Connect, peer: Any) -> None:
    head = head_of("/u", len(GET))
    for _ in range(3):
        peer.send(head + GET)
        peer.send(head)
        peer.send(GET)
        peer.send(head + GET[:3])
        peer.send(GET[3:])
        peer.send(head[:9])
        peer.send(head[9:])
        peer.send(GET)
    assert took(peer) == [("POST", "/u", GET)] * 12


@pytest.mark.parametrize("size", [len(GET), 2 * len(GET), 3 * len(GET)])
def test_piece_of_a_body_that_is_a_known_head_is_a_piece_of_a_body(peer: Any, size: int) -> None:
    head = head_of("/u", size)
    for _ in range(3):
        peer.send(head)
        for _ in range(size // len(GET)):
            peer.send(GET)
    assert took(peer) == [("POST", "/u", GET * (size // len(GET)))] * 3


def test_chunk_and_trailer_that_are_a_known_head_are_none(peer: Any) -> None:
    for _ in range(2):
        peer.send(b"POST /u HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        peer.send(b"%x\r\n" % len(GET))
        peer.send(GET)
        peer.send(b"\r\n0\r\n\r\n")
    assert took(peer) == [("POST", "/u", GET)] * 2
    peer.send(b"POST /u HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
    peer.send(GET)
    assert len(took(peer)) == 2  # no trailer either, and refused
    assert peer.statuses[-1] == 400


def test_end_of_a_large_body_that_is_a_known_head_is_a_body(peer: Any) -> None:
    peer.send(head_of("/u", 70_000) + b"x" * (70_000 - len(GET)))
    peer.send(GET)
    assert [len(body) for _, _, body in took(peer)] == [70_000]


def test_two_requests_in_one_read_teach_nothing_false(connect: Connect) -> None:
    peer, other = connect(), head_of("/other", 5)
    peer.send(HEAD + b"hello" + other + b"there")
    peer.send(other + b"there" + GET)
    peer.send(HEAD + b"world")
    peer.send(other + b"world")
    paths = [request.path for request in peer.requests]
    assert paths == ["/known", "/other", "/other", "/got", "/known", "/other"]


def test_end_of_a_body_and_the_next_head_teach_nothing_false(connect: Connect) -> None:
    peer = connect()
    first, second = head_of("/1", 64) + b"x" * 32, b" " * 32 + HEAD + b"hello"
    for _ in range(2):
        peer.send(first)
        peer.send(second)
        peer.send(HEAD + b"world")
    assert [request.path for request in peer.requests] == ["/1", "/known", "/known"] * 2
    smuggler = connect(peer)
    smuggler.send(b" " * 32 + HEAD + b"hello")
    assert not smuggler.requests
    assert smuggler.statuses == [400]


def test_end_of_a_body_that_spells_a_head_teaches_nothing_false(connect: Connect) -> None:
    """A read that begins inside of a body, with bytes that look like a head, and continues to another head."""
    peer, other = connect(), head_of("/other", 5)
    peer.send(head_of("/1", 8 + len(HEAD)) + b"x" * 8)
    peer.send(HEAD + other + b"there")
    peer.send(HEAD + b"hello")
    assert [request.path for request in peer.requests] == ["/1", "/other", "/known"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nA: b\r\n folded\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\nContent-Length: 8\n\nab\r\n\r\ncd",
    ],
)
def test_malformed_head_is_never_learned(connect: Connect, garbage: bytes) -> None:
    first = connect()
    for peer in (first, connect(first), connect(first)):
        peer.send(garbage)
        assert not peer.requests
        assert peer.statuses[0] in (400, 405)


def test_nothing_is_recognised_behind_a_refusal(peer: Any) -> None:
    peer.send(b"GET / HTTP/1.1\r\nHost: h\r\nA : b\r\n\r\n")
    peer.send(GET)
    peer.send(HEAD)
    peer.send(b"hello")
    assert not took(peer)
    assert peer.statuses == [200, 200, 400]


def test_nothing_is_recognised_behind_the_last_request(peer: Any) -> None:
    peer.holds = True
    peer.send(b"GET /last HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    peer.send(GET)
    peer.send(HEAD)
    assert took(peer) == [("GET", "/last", b"")]


# ---------------------------------------------------------------------------------------- the connection


def test_recognised_requests_are_answered_in_turn(peer: Any) -> None:
    peer.holds = True
    for _ in range(3):
        peer.send(GET)
    for number in (2, 3, 4):
        assert len(peer.replies) == number + 1
        peer.replies[number](HttpReply(200, (), (b"<%d>" % number,)))
        peer.send(b"")
    positions = [peer.answer.index(b"<%d>" % number) for number in (2, 3, 4)]
    assert positions == sorted(positions)


def test_reading_pauses_while_a_recognised_request_is_unanswered_and_the_next_is_there(connect: Connect) -> None:
    peer = connect()
    peer.send(GET)
    peer.holds = True
    peer.send(GET)
    assert peer.wire.reads  # so that a caller that disconnects is noticed
    peer.send(GET)
    assert not peer.wire.reads
    peer.replies[1](HttpReply(200))
    assert peer.wire.reads


def test_lost_connection_cancels_recognised_requests_and_drops_what_it_awaited(peer: Any) -> None:
    peer.holds = True
    peer.send(HEAD + b"hello")
    peer.send(HEAD)
    peer.protocol.connection_lost(None)
    assert peer.cancelled == [2]
    assert len(took(peer)) == 1


@pytest.mark.parametrize("pieces", [(b"hello",), (b"he", b"llo"), (b"hello" + GET,)])
def test_stopping_waits_for_the_body_behind_a_known_head(peer: Any, pieces: tuple[bytes, ...]) -> None:
    peer.send(HEAD)
    peer.protocol.stop()
    assert not peer.wire.is_closed
    for piece in pieces:
        peer.send(piece)
    behind = [("GET", "/got", b"")] if pieces[0].endswith(GET) else []  # it arrived while others were answered
    assert took(peer) == [("POST", "/known", b"hello"), *behind]
    assert peer.answer.count(b"Connection: close\r\n") == 1
    assert peer.wire.is_closed


def test_stopping_gives_up_a_body_that_never_comes(peer: Any) -> None:
    peer.send(HEAD)
    peer.protocol.stop()
    sweep(peer, 4)
    assert peer.statuses == [200, 200, 408]
    assert peer.wire.is_closed


def test_stopping_while_recognised_requests_are_unanswered_answers_them(peer: Any) -> None:
    peer.holds = True
    peer.send(HEAD + b"hello")
    peer.protocol.stop()
    peer.send(GET)
    assert len(took(peer)) == 1
    peer.replies[2](HttpReply(200))
    assert b"Connection: close" in peer.answer
    assert peer.wire.is_closed


def test_body_that_never_comes_behind_a_known_head_is_given_up(peer: Any) -> None:
    peer.send(HEAD)
    sweep(peer, 31)
    assert peer.statuses == [200, 200]
    sweep(peer, 1)
    assert peer.statuses == [200, 200, 408]
    assert b"Connection: close" in peer.answer
    peer.send(b"hello")
    peer.send(GET)
    assert not took(peer)


def test_refusal_of_a_body_that_never_came_does_not_hold_up_the_end(peer: Any) -> None:
    peer.send(HEAD)
    sweep(peer, 32)
    assert not peer.wire.is_closed
    peer.protocol.stop()
    assert peer.protocol.is_idle


def test_caller_may_be_slow_for_as_long_as_it_is_never_too_slow(peer: Any) -> None:
    for turn in range(40):
        peer.send(HEAD)
        sweep(peer, 20)
        if turn % 2:
            peer.send(b"he")
            sweep(peer, 5)
            peer.send(b"llo")
        else:
            peer.send(b"hello")
        sweep(peer, 600)
    assert peer.statuses == [200] * 42


def test_known_head_ends_the_time_that_heads_may_take(connect: Connect, peer: Any) -> None:
    slow = connect(peer)
    sweep(slow, 30)
    slow.send(b"\r\n")
    sweep(slow, 30)
    slow.send(HEAD)
    sweep(slow, 30)
    slow.send(b"hello")
    assert slow.statuses == [200]


def test_slow_body_does_not_shorten_the_time_of_the_next_head(peer: Any) -> None:
    peer.send(HEAD)
    sweep(peer, 20)
    peer.send(b"hello")
    for piece in (b"GET /", b"slow", b" HTTP", b"/1.1\r\nHost: h"):
        peer.send(piece)
        sweep(peer, 14)
    peer.send(b"\r\n\r\n")
    assert peer.statuses == [200] * 4


def test_connection_is_idle_behind_a_recognised_request(connect: Connect, peer: Any) -> None:
    fresh = connect(peer)
    fresh.send(HEAD + b"hello")
    sweep(fresh, 100)
    assert not fresh.wire.is_closed
    assert fresh.protocol.is_idle


def test_thousands_of_heads_are_all_answered_right(connect: Connect) -> None:
    peer = connect()
    for _ in range(2):
        for number in range(1500):
            peer.send(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number)
    assert [request.path for request in peer.requests] == [f"/{number}" for number in range(1500)] * 2


def test_recognised_tensors_are_freed_with_the_answer(connect: Connect, make_caller: MakeCaller) -> None:
    caller, peer = make_caller({"X": ("UINT8", (-1,))}), connect()
    peer.protocol.dispatch = caller.routes.dispatch
    gc.disable()
    try:
        for _ in range(3):
            peer.send(infer(tensor(4), b"abcd"))
            tensor_ref = weakref.ref(caller.model.requests.pop().inputs["X"])
            peer.wire.written.clear()
            assert tensor_ref() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------- any stream at all


def tensor(size: int, **rest: Any) -> bytes:
    entry = {"name": "X", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
    return orjson.dumps({"inputs": [entry], **rest})


def infer(text: bytes, tensors: bytes, *headers: str) -> bytes:
    length = [f"Inference-Header-Content-Length: {len(text)}"] if tensors else []
    return head_of("/v2/models/echo/infer", len(text + tensors), *length, *headers) + text + tensors


LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n"
BINARY_OUT = {"parameters": {"binary_data_output": True}}
COMMON = [
    infer(tensor(4), b"abcd"),
    infer(tensor(4), b"efgh"),
    infer(tensor(4, **BINARY_OUT), b"\r\n\r\n"),
    LIVE,
    head_of("/v2", 3) + b"abc",
    head_of("/v2", len(LIVE)) + LIVE,
    head_of("/v2", len(head_of("/v2", 3))) + head_of("/v2", 3),
]
RARE = [
    infer(tensor(4), b"abc"),
    infer(tensor(4), b"abcdefgh"),
    infer(tensor(4, id="7"), b"abcd"),
    infer(tensor(4, parameters={"sequence_start": True}), b"abcd"),
    infer(tensor(4, outputs=[{"name": "X", "parameters": {"classification": 1}}]), b"abcd"),
    infer(tensor(0), b""),
    infer(b'{"inputs":[{"name":"X","datatype":"UINT8","shape":[2],"data":[1,2]}]}', b""),
    infer(tensor(4), b"abcd", "Expect: 100-continue"),
    infer(tensor(4), b"abcd", "Connection: close"),
    infer(tensor(4), b"abcd", "Connection: upgrade", "Upgrade: h2c"),
    infer(tensor(4), b"abcd", "A: " + "x" * 1000),
    infer(tensor(4), b"abcd").replace(b"Content-Length: 1", b"Content-Length: 9"),
    infer(tensor(4), b"abcd").replace(b"HTTP/1.1", b"HTTP/1.0"),
    infer(tensor(70_000), b"x" * 70_000),
    head_of("/v2/models/echo/infer", 4, "Inference-Header-Content-Length: 0") + b"abcd",
    head_of("/nowhere", 0),
    head_of("/v2", 3) + b"abcd",
    infer(tensor(len(LIVE), **BINARY_OUT), LIVE),
    head_of("/v2", 200_000),
    b"HEAD /v2 HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /v2 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"3\r\nabc\r\n0\r\n\r\n",
    b"%x\r\n" % len(LIVE) + LIVE + b"\r\n",
    b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n",
    b"FROB / HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: h\r\nA : b\r\n\r\n",
    b"GET /v2/health",
    b"\r\n",
    b"\r\n\r\n",
    b"\r\n\r\n" + LIVE,
    b"\n",
    b"G",
]


class World:
    """A server with two callers, each of which connects anew when its connection ends."""

    def __init__(self, connect: Connect, make_caller: MakeCaller, limits: dict[str, int], remembers: bool) -> None:
        self.connect = connect
        self.limits = limits
        self.remembers = remembers
        self.caller = make_caller({"X": ("UINT8", (-1,))}, http_max_input_size=100_000)
        self.routes = self.caller.routes
        self.log: list[Any] = []
        self.holds = False
        self.held: list[tuple[HttpRequest, Reply]] = []
        self.gone: list[Any] = []
        self.base = connect(**limits)
        self.peers = [self._new(), self._new()]

    def _new(self) -> Any:
        peer = self.connect(self.base, **self.limits)
        peer.protocol.dispatch = self._dispatch
        if not self.remembers:
            peer.protocol._reader.find_head = lambda raw: None
        return peer

    def _dispatch(self, request: HttpRequest, reply: Reply) -> Cancel | None:
        headers = dict(request.headers), list(request.raw_headers)
        self.log.append((request.method, request.path, *headers, bytes(request.body)))
        if self.holds:
            self.held.append((request, reply))
        else:
            self._answer(request, reply)
        return lambda: self.log.append("cancelled")

    def _answer(self, request: HttpRequest, reply: Reply) -> None:
        routes = self.routes if self.remembers else Routes(self.caller.engine)
        routes.dispatch(request, reply)

    def receive(self, number: int, data: bytes) -> None:
        peer = self.peers[number]
        if peer.wire.is_closed or peer.wire.has_eof:
            self.gone.append(state(peer))
            peer = self.peers[number] = self._new()
        peer.send(data)

    def answer(self) -> None:
        if self.held:
            self._answer(*self.held.pop(0))

    def do(self, step: Any) -> None:
        what, number, data = step
        if what == "receive":
            self.receive(number, data)
        elif what == "sweep":
            self.peers[number].protocol.sweep()
        elif what == "stop":
            self.peers[number].protocol.stop()
        elif what == "lose":
            self.peers[number].protocol.connection_lost(None)
            self.peers[number] = self._new()
        elif what == "hold":
            self.holds = not self.holds
        else:
            self.answer()
        for peer in self.peers:
            peer.take_turns()
            peer.send(b"")  # the bytes that it may read by now

    def seen(self) -> Any:
        return self.log, self.gone, [state(peer) for peer in self.peers]


def state(peer: Any) -> Any:
    wire = peer.wire
    return peer.answer, wire.is_closed, wire.has_eof, wire.reads


@st.composite
def messages(draw: st.DrawFn) -> list[bytes]:
    """One message as the reads that it arrives in: cut where its head ends, as a rule."""
    message = draw(st.sampled_from(COMMON) | st.sampled_from(COMMON) | st.sampled_from(RARE))
    head = message.find(b"\r\n\r\n") + 4
    usual = st.sampled_from(([], [], [head], [head], [head, head + 1], [head + 1], [head, len(message) - 1]))
    cuts = draw(usual | st.lists(st.integers(0, len(message)), min_size=1, max_size=2))
    ends = [*sorted({cut for cut in cuts if 0 < cut < len(message)}), len(message)]
    return [message[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


_others = st.tuples(
    st.sampled_from(("sweep", "sweep", "sweep", "hold", "answer", "answer", "stop", "lose")), st.integers(0, 1)
)


@st.composite
def courses(draw: st.DrawFn) -> list[Any]:
    """Generate the events of two connections: a few messages repeated, some joined to the next, and more."""
    alphabet = draw(st.lists(messages(), min_size=1, max_size=3))
    arrivals = st.tuples(st.sampled_from(alphabet), st.sampled_from((0, 0, 1)), st.sampled_from((True, False, False)))
    steps: list[Any] = []
    waiting = [b"", b""]
    for event in draw(st.lists(arrivals | arrivals | arrivals | _others, min_size=12, max_size=30)):
        if isinstance(event[0], str):
            steps.append((*event, b""))
            continue
        (first, *rest), number, is_joined = event
        pieces = [waiting[number] + first, *rest]
        waiting[number] = pieces.pop() if is_joined else b""
        steps += [("receive", number, piece) for piece in pieces]
    return steps


@given(course=courses(), head_bytes=st.sampled_from((150, 65536)))
@settings(max_examples=400, deadline=None)
def test_memory_changes_no_reply(connect: Connect, make_caller: MakeCaller, course: list[Any], head_bytes: int) -> None:
    limits = {"head_bytes": head_bytes, "input_bytes": 100_000}
    world, oracle = (World(connect, make_caller, limits, remembers) for remembers in (True, False))
    for step in [*course, *[("answer", 0, b"")] * 20]:
        world.do(step)
        oracle.do(step)
        assert world.seen() == oracle.seen()
