"""RFC 9112 as bytes: requests of a client, and the answers of each port of the server.

Every row is sent to the native HTTP host, to hypercorn and to the metrics port, and behind it a request that ends the
connection: if the row leaves the connection in order, that one is answered as the last, and not otherwise. So a row
says how many requests the server has seen, and none can hide in a body.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

DATA = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]}).encode()
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n"
INFER = b"POST /v2/models/echo_fp32/infer HTTP/1.1\r\nHost: h\r\n"
#: A request as an attacker hides it; if it is seen, it is answered and counted.
HIDDEN = INFER + b"Content-Length: %d\r\n\r\n" % len(DATA) + DATA
LAST = LIVE + b"Connection: close\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
#: The status of an inference: 200, and 405 on the port of metrics.
INFERRED = 1200
HEAD_BYTES = 64 * 1024


def in_body(request: bytes, *lines: bytes, body: bytes = HIDDEN) -> bytes:
    """``request`` with ``lines`` and a body of known length."""
    return request + b"".join(line + b"\r\n" for line in lines) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunks(*parts: bytes, trailers: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailers + b"\r\n"


@dataclass(frozen=True)
class Row:
    """``statuses`` of the answers to ``sent``; ``stays`` if the connection stays open after them.

    ``h11`` has a different answer of hypercorn that the RFC permits, and ``why`` the reason.
    """

    name: str
    sent: bytes
    statuses: tuple[int, ...]
    stays: bool = True
    h11: tuple[tuple[int, ...], bool] | None = None
    why: str = ""


def good(name: str, sent: bytes, *statuses: int, **rest: object) -> Row:
    return Row(name, sent, statuses or (200,), **rest)  # type: ignore[arg-type]


def bad(name: str, sent: bytes, status: int = 400, **rest: object) -> Row:
    """Refused, and the connection closed: nothing behind it is a request."""
    return Row(name, sent + HIDDEN, (status,), False, **rest)  # type: ignore[arg-type]


ROWS = [
    # 2, 3: the request line
    good("a request", LIVE + b"\r\n"),
    good("with a body", in_body(LIVE)),
    good("an inference", HIDDEN, INFERRED),
    good("empty lines in front", b"\r\n\r\n" + LIVE + b"\r\n"),
    good("a query", LIVE.replace(b"live", b"live?a=b&c") + b"\r\n"),
    good("an absolute target", LIVE.replace(b"/v2", b"http://elsewhere/v2") + b"\r\n"),
    good("a later minor version", LIVE.replace(b"1.1", b"1.2") + b"\r\n"),
    bad("HTTP/0.9", b"GET /v2/health/live\r\n\r\n"),
    bad("HTTP/0.9 with a header", b"GET /v2/health/live\r\nHost: h\r\n\r\n"),
    bad("another protocol", LIVE.replace(b"HTTP", b"RTSP") + b"\r\n"),
    bad("a protocol of llhttp's", LIVE.replace(b"HTTP/1.1", b"ICE/1.0") + b"\r\n"),
    bad("lower-case protocol", LIVE.replace(b"HTTP", b"http") + b"\r\n"),
    bad("HTTP/2.0", LIVE.replace(b"1.1", b"2.0") + b"\r\n", 505),
    bad("HTTP/3.0", LIVE.replace(b"1.1", b"3.0") + b"\r\n", 505),
    bad("a version without its dot", LIVE.replace(b"1.1", b"11") + b"\r\n"),
    bad("a version of two digits", LIVE.replace(b"1.1", b"1.10") + b"\r\n"),
    bad("two blanks before the target", LIVE.replace(b"GET ", b"GET  ") + b"\r\n"),
    bad("two blanks before the version", LIVE.replace(b" HTTP", b"  HTTP") + b"\r\n"),
    bad("a tab in the request line", LIVE.replace(b" HTTP", b"\tHTTP") + b"\r\n"),
    bad("a blank behind the version", LIVE.replace(b"1.1", b"1.1 ") + b"\r\n"),
    bad("a blank in front of the method", b" " + LIVE + b"\r\n"),
    bad("a blank in the target", LIVE.replace(b"live", b"li ve") + b"\r\n"),
    bad("a NUL in the target", LIVE.replace(b"live", b"li\0ve") + b"\r\n"),
    bad("a target that is none", LIVE.replace(b"/v2/health", b"v2/health") + b"\r\n"),
    bad("no target", LIVE.replace(b"/v2/health/live ", b"") + b"\r\n"),
    bad("a method that is no token", LIVE.replace(b"GET", b"G(T") + b"\r\n"),
    bad("no method", LIVE.replace(b"GET", b"") + b"\r\n"),
    good("a lower-case method", LIVE.replace(b"GET", b"get") + b"\r\n", 405, h11=((200,), True),
         why="hypercorn writes all methods in capitals; what the request says where it ends is the same"),
    good("an unknown method", in_body(LIVE.replace(b"GET", b"FROB")), 405),
    # 2.2: line ends
    bad("LF behind the request line", LIVE.replace(b"1.1\r", b"1.1") + b"\r\n"),
    bad("LF behind a header", LIVE + b"A: b\nC: d\r\n\r\n"),
    bad("LF at the end of the head", LIVE + b"A: b\r\n\n"),
    bad("LF only", LIVE.replace(b"\r", b"") + b"\n"),
    bad("CR in a value", LIVE + b"A: b\rc\r\n\r\n"),
    bad("CR only", LIVE + b"A: b\rC: d\r\r\n\r\n"),
    bad("two CRs before LF", LIVE + b"A: b\r\r\n\r\n"),
    # 3.2: Host
    bad("no Host", LIVE.replace(b"Host: h\r\n", b"") + b"\r\n"),
    bad("two Hosts", LIVE + b"Host: h\r\n\r\n"),
    bad("two Hosts that differ", LIVE + b"Host: i\r\n\r\n"),
    bad("a Host that is two", LIVE.replace(b"Host: h", b"Host: h i") + b"\r\n"),
    bad("a Host that is a path", LIVE.replace(b"Host: h", b"Host: h/i") + b"\r\n"),
    good("an empty Host", LIVE.replace(b"Host: h", b"Host:") + b"\r\n"),
    good("a Host of numbers", LIVE.replace(b"Host: h", b"Host: [::1]:8000") + b"\r\n"),
    # 5: fields
    good("no blank behind the colon", LIVE + b"A:b\r\n\r\n"),
    good("blanks around a value", in_body(LIVE, b"A: \t b \t ")),
    good("blanks around the length", LIVE + b"Content-Length: \t 3 \t \r\n\r\nabc"),
    good("an empty value", LIVE + b"A:\r\nB: \r\n\r\n"),
    good("bytes beyond ASCII in a value", LIVE + b"A: \xc3\xa9\xff\r\n\r\n"),
    bad("a blank behind a name", LIVE + b"A : b\r\n\r\n"),
    bad("a blank behind Content-Length", LIVE + b"Content-Length : 3\r\n\r\nabc"),
    bad("a blank in a name", LIVE + b"A B: c\r\n\r\n"),
    bad("no name", LIVE + b": b\r\n\r\n"),
    bad("no colon", LIVE + b"A\r\n\r\n"),
    bad("a name that is no token", LIVE + b"A(b): c\r\n\r\n"),
    bad("a name beyond ASCII", LIVE + b"\xc3\xa9: c\r\n\r\n"),
    bad("a NUL in a name", LIVE + b"A\0: b\r\n\r\n"),
    bad("a NUL in a value", LIVE + b"A: b\0c\r\n\r\n"),
    bad("a folded value", LIVE + b"A: b\r\n c\r\n\r\n"),
    bad("a folded length", LIVE + b"Content-Length:\r\n 3\r\n\r\nabc"),
    bad("a fold before the first field", LIVE.replace(b"Host", b" A: b\r\nHost") + b"\r\n"),
    good("as many fields as there may be", LIVE + b"A: b\r\n" * 127 + b"\r\n"),
    bad("one field too many", LIVE + b"A: b\r\n" * 128 + b"\r\n", 431),
    good("a head as long as it may be", LIVE + b"A: ".ljust(HEAD_BYTES - len(LIVE) - 4, b"x") + b"\r\n\r\n"),
    bad("a head one byte too long", LIVE + b"A: ".ljust(HEAD_BYTES - len(LIVE) - 3, b"x") + b"\r\n\r\n", 431),
    bad("a head of 100 KB in short fields", LIVE + (b"A: ".ljust(998, b"x") + b"\r\n") * 100 + b"\r\n", 431),
    # 6.2, 6.3: Content-Length
    bad("two lengths that differ", LIVE + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc"),
    bad("two lengths that agree", LIVE + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
    bad("a list of lengths", LIVE + b"Content-Length: 3, 3\r\n\r\nabc"),
    bad("a list of lengths that differ", LIVE + b"Content-Length: 3, 4\r\n\r\nabc"),
    bad("a negative length", LIVE + b"Content-Length: -3\r\n\r\nabc"),
    bad("a length with a sign", LIVE + b"Content-Length: +3\r\n\r\nabc"),
    bad("a length in hex", LIVE + b"Content-Length: 0x3\r\n\r\nabc"),
    bad("a length with an underscore", LIVE + b"Content-Length: 1_0\r\n\r\n0123456789"),
    bad("a length of other digits", LIVE + "Content-Length: ٣\r\n\r\nabc".encode()),
    bad("a length with a blank", LIVE + b"Content-Length: 1 0\r\n\r\n0123456789"),
    bad("an empty length", LIVE + b"Content-Length: \r\n\r\n"),
    bad("a length that is none", LIVE + b"Content-Length: three\r\n\r\nabc"),
    bad("a length beyond 64 bits", LIVE + b"Content-Length: 18446744073709551619\r\n\r\nabc"),
    bad("a length of 5000 digits", LIVE + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\nabc"),
    bad("a length of zeros and beyond", LIVE + b"Content-Length: 0" + b"9" * 30 + b"\r\n\r\nabc"),
    good("a length with zeros in front", LIVE + b"Content-Length: 003\r\n\r\nabc"),
    good("zero", LIVE + b"Content-Length: 0\r\n\r\n"),
    # 6.1: Transfer-Encoding
    good("chunked", LIVE + CHUNKED + chunks(HIDDEN, b"x")),
    good("an inference in chunks", INFER + CHUNKED + chunks(DATA[:9], DATA[9:]), INFERRED),
    good("chunked in capitals", LIVE + b"Transfer-Encoding: Chunked\r\n\r\n" + chunks(HIDDEN)),
    bad("chunked and a length", LIVE + b"Content-Length: 5\r\n" + CHUNKED + chunks()),
    bad("a length and chunked", LIVE + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + chunks()),
    bad("gzip, chunked", LIVE + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunks(b"x"), 501),
    bad("gzip and then chunked", LIVE + b"Transfer-Encoding: gzip\r\n" + CHUNKED + chunks(b"x"), 501),
    bad("chunked, gzip", LIVE + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + chunks(b"x")),
    bad("chunked twice", LIVE + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + chunks(b"x")),
    bad("two fields of chunked", LIVE + b"Transfer-Encoding: chunked\r\n" + CHUNKED + chunks(b"x")),
    bad("gzip", LIVE + b"Transfer-Encoding: gzip\r\n\r\n"),
    bad("identity", LIVE + b"Transfer-Encoding: identity\r\n\r\n"),
    bad("identity and a length", in_body(LIVE, b"Transfer-Encoding: identity")),
    bad("an empty coding", LIVE + b"Transfer-Encoding:\r\n\r\n"),
    bad("xchunked", LIVE + b"Transfer-Encoding: xchunked\r\n\r\n" + chunks(b"x")),
    bad("chunked with a vertical tab", LIVE + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + chunks(b"x")),
    bad("chunked in quotes", LIVE + b'Transfer-Encoding: "chunked"\r\n\r\n' + chunks(b"x")),
    bad("chunked with a parameter", LIVE + b"Transfer-Encoding: chunked;q=1\r\n\r\n" + chunks(b"x")),
    bad("chunked in HTTP/1.0", LIVE.replace(b"1.1", b"1.0") + CHUNKED + chunks(b"x")),
    # 7.1: chunks
    good("chunk extensions", LIVE + CHUNKED + b'3;a=b;c="d e"\r\nabc\r\n0;e\r\n\r\n'),
    good("sizes in capitals and with zeros", LIVE + CHUNKED + b"00A\r\n0123456789\r\n000\r\n\r\n"),
    good("trailers, which change nothing", LIVE + CHUNKED + chunks(b"x", trailers=b"Content-Length: 9\r\nA: b\r\n")),
    bad("a size that is none", LIVE + CHUNKED + b"zz\r\nabc\r\n0\r\n\r\n"),
    bad("a size with 0x", LIVE + CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n"),
    bad("a size with a sign", LIVE + CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n"),
    bad("a negative size", LIVE + CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n"),
    bad("no size", LIVE + CHUNKED + b"\r\nabc\r\n0\r\n\r\n"),
    bad("a size with an underscore", LIVE + CHUNKED + b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n"),
    bad("a blank in front of a size", LIVE + CHUNKED + b" 3\r\nabc\r\n0\r\n\r\n"),
    bad("a blank behind a size", LIVE + CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n"),
    bad("a size of 30 digits", LIVE + CHUNKED + b"f" * 30 + b"\r\nabc\r\n0\r\n\r\n"),
    bad("a size beyond 64 bits", LIVE + CHUNKED + b"10000000000000003\r\nabc\r\n0\r\n\r\n"),
    bad("LF behind a size", LIVE + CHUNKED + b"3\nabc\r\n0\r\n\r\n"),
    bad("LF behind an extension", LIVE + CHUNKED + b"3;a\nabc\r\n0\r\n\r\n"),
    bad("CR in an extension", LIVE + CHUNKED + b"3;a\rb\r\nabc\r\n0\r\n\r\n"),
    bad("LF behind a chunk", LIVE + CHUNKED + b"3\r\nabc\n0\r\n\r\n"),
    bad("nothing behind a chunk", LIVE + CHUNKED + b"3\r\nabc0\r\n\r\n"),
    bad("a chunk longer than it says", LIVE + CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n"),
    bad("an endless extension", LIVE + CHUNKED + b"3;" + b"x" * 100_000 + b"\r\nabc\r\n0\r\n\r\n"),
    bad("LF behind a trailer", LIVE + CHUNKED + b"0\r\nA: b\n\r\n"),
    bad("a trailer that is none", LIVE + CHUNKED + b"0\r\nA\r\n\r\n"),
    bad("a blank behind the name of a trailer", LIVE + CHUNKED + b"0\r\nA : b\r\n\r\n"),
    bad("a folded trailer", LIVE + CHUNKED + b"0\r\nA: b\r\n c\r\n\r\n"),
    bad("too long a trailer", LIVE + CHUNKED + b"0\r\nA: " + b"x" * 100_000 + b"\r\n\r\n", 431),
    bad("too many trailers", LIVE + CHUNKED + b"0\r\n" + b"A: b\r\n" * 129 + b"\r\n", 431),
    # 9: the connection
    good("pipelined requests", (LIVE + b"\r\n") * 5, *[200] * 5),
    good("pipelined inferences", HIDDEN * 5, *[INFERRED] * 5),
    Row("a request behind Connection: close", LAST + HIDDEN, (200,), False),
    Row("close among other tokens", LIVE + b"Connection: a, Close ,b\r\n\r\n" + HIDDEN, (200,), False),
    Row("close in a field of its own", LIVE + b"Connection: a\r\nConnection: close\r\n\r\n" + HIDDEN, (200,), False),
    Row("HTTP/1.0", LIVE.replace(b"1.1", b"1.0") + b"\r\n" + HIDDEN, (200,), False),
    Row("HTTP/1.0 without a Host", b"GET /v2/health/live HTTP/1.0\r\n\r\n" + HIDDEN, (200,), False),
    Row("HTTP/1.0 with a body", in_body(LIVE.replace(b"1.1", b"1.0"), body=b"x") + HIDDEN, (200,), False),
    Row("HTTP/1.0 and keep-alive", LIVE.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n\r\n", (200,), False),
    bad("HTTP/1.0 and two Hosts", LIVE.replace(b"1.1", b"1.0") + b"Host: i\r\n\r\n"),
    # 9.9 and RFC 9110, 7.8: what else a connection could become
    good("an upgrade with a body", in_body(LIVE, b"Connection: upgrade", b"Upgrade: h2c")),
    good("an upgrade to nothing with a body", in_body(LIVE, b"Connection: upgrade", b"Upgrade: x")),
    good("an upgrade without its field", in_body(LIVE, b"Connection: upgrade")),
    good("an upgrade with chunks", LIVE + b"Connection: upgrade\r\nUpgrade: x\r\n" + CHUNKED + chunks(HIDDEN)),
    good("an upgrade with an inference", in_body(INFER, b"Connection: Upgrade", b"Upgrade: h2c", body=DATA), INFERRED),
    good("an upgrade without a body", LIVE + b"Connection: upgrade\r\nUpgrade: x\r\n\r\n"),
    good("an upgrade to a web socket", in_body(LIVE, b"Connection: upgrade", b"Upgrade: websocket")),
    bad("CONNECT", b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 405),
    bad("CONNECT with a body", in_body(b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n"), 405),
    bad("CONNECT to a path", in_body(INFER.replace(b"POST", b"CONNECT")), 405),
    good("OPTIONS of the server", b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", 404),
    bad("the server as the target of GET", b"GET * HTTP/1.1\r\nHost: h\r\n\r\n"),
    good("HEAD", LIVE.replace(b"GET", b"HEAD") + b"\r\n", 405),
    good("TRACE with a body", in_body(LIVE.replace(b"GET", b"TRACE")), 405),
    # RFC 9110, 10.1.1: Expect
    good("100-continue with the body at once", in_body(LIVE, b"Expect: 100-continue")),
    good("another expectation", in_body(LIVE, b"Expect: tea")),
    good("100-continue without a body", LIVE + b"Expect: 100-continue\r\n\r\n"),
    Row("100-continue in HTTP/1.0", in_body(LIVE.replace(b"1.1", b"1.0"), b"Expect: 100-continue"), (200,), False),
    # other protocols
    bad("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a hello of TLS"),
    bad("a line of SMTP", b"HELO example.com\r\n\r\n"),
]  # fmt: skip


@pytest.fixture(scope="session", params=["native", "hypercorn", "metrics"])
def port(request: pytest.FixtureRequest) -> tuple[str, int]:
    """Its name, and the number."""
    server: Headrace = request.getfixturevalue("hypercorn" if request.param == "hypercorn" else "server")
    return request.param, server.ports["Metrics Service"] if request.param == "metrics" else server.http


def ask(number: int, sent: bytes, step: int = 1 << 30) -> bytes:
    """All that the server at port ``number`` answers until it closes."""
    with socket.create_connection(("127.0.0.1", number), timeout=30) as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            for begin in range(0, len(sent), step):
                caller.sendall(sent[begin : begin + step])
        with contextlib.suppress(ConnectionResetError):
            while piece := caller.recv(1 << 16):
                answer += piece
        return answer


def statuses(answer: bytes, request: bytes = b"") -> tuple[int, ...]:
    """Of all answers in ``answer``, each of which must be as long as it says; the first to HEAD has no body.

    Interim answers are omitted: whether the server sends 100 depends on how soon the client continues.
    """
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        found.append(int(head.split(b" ")[1]))
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        assert length or found[-1] == 100, head
        size = int(length[1]) if length and (found[1:] or not request.startswith(b"HEAD")) else 0
        assert len(rest) >= size, answer
        answer = rest[size:]
    return tuple(status for status in found if status != 100)


def expected(row: Row, port: str) -> tuple[int, ...]:
    answers, stays = row.h11 if row.h11 is not None and port == "hypercorn" else (row.statuses, row.stays)
    inferred = 405 if port == "metrics" else 200
    if port == "metrics":
        answers = tuple(200 if status == 404 and b"OPTIONS" not in row.sent else status for status in answers)
        answers = tuple(405 if b"OPTIONS" in row.sent and status == 404 else status for status in answers)
    return (*(inferred if status == INFERRED else status for status in answers), *[200] * stays)


def inferences(server: Headrace) -> int:
    stats = json.loads(server.get("/v2/models/echo_fp32/stats")[1])
    count: int = stats["model_stats"][0]["inference_count"]
    return count


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_caller_is_answered_as_the_rfc_says(
    port: tuple[str, int], row: Row, server: Headrace, hypercorn: Headrace
) -> None:
    """First with an empty head cache, and again when the server may have cached the head."""
    name, number = port
    host = hypercorn if name == "hypercorn" else server
    before = inferences(host)
    wanted = expected(row, name)
    for _ in range(2):
        assert statuses(ask(number, row.sent + LAST), row.sent) == wanted
    seen = 0 if name == "metrics" else 2 * row.statuses.count(INFERRED)
    assert inferences(host) - before == seen


@pytest.mark.parametrize("row", [row for row in ROWS if len(row.sent) < 600], ids=lambda row: row.name)
@pytest.mark.parametrize("step", [1, 7])
def test_pieces_change_no_answer(server: Headrace, row: Row, step: int) -> None:
    assert statuses(ask(server.http, row.sent + LAST, step), row.sent) == expected(row, "native")


@pytest.mark.parametrize("sent", [HIDDEN, INFER + CHUNKED + chunks(DATA), HIDDEN * 3], ids=["one", "chunks", "three"])
def test_a_client_that_half_closes_is_answered(http_server: Headrace, sent: bytes) -> None:
    """Half-closed behind the last byte of a whole request."""
    with socket.create_connection(("127.0.0.1", http_server.http), timeout=30) as caller:
        caller.sendall(sent)
        caller.shutdown(socket.SHUT_WR)
        with caller.makefile("rb") as stream:
            assert statuses(stream.read()) == (200,) * sent.count(b"POST")


def test_a_client_that_expects_100_gets_it(port: tuple[str, int]) -> None:
    with socket.create_connection(("127.0.0.1", port[1]), timeout=30) as caller, caller.makefile("rb") as stream:
        caller.sendall(LIVE + b"Expect: 100-Continue\r\nContent-Length: 3\r\n\r\n")
        assert stream.readline().startswith(b"HTTP/1.1 100 ")
        while stream.readline().strip():
            pass
        caller.sendall(b"abc" + LAST)
        assert statuses(stream.read()) == (200, 200)


def test_nothing_is_repeated(port: tuple[str, int]) -> None:
    """Names of rows are claims, and each is made once."""
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))
