"""The meaning of request heads: the fast reader agrees with the rules one by one, and known heads are found by their
bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from headrace_http.request_head import Refused, RequestHead, RequestHeadCache, _parse_unusual, parse_head

RAW = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n"
HEAD = RequestHead("POST", "/a", {b"content-length": b"5"}, RAW, 5)


def numbered(number: int) -> bytes:
    return b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number


def of_length(size: int) -> bytes:
    return b"GET /".ljust(size - 22, b"x") + b" HTTP/1.1\r\nHost: h\r\n\r\n"


def keep(known: RequestHeadCache, received: bytes, head: RequestHead) -> None:
    known.keep(received, head)


def test_head_is_known_by_its_bytes() -> None:
    known = RequestHeadCache()
    keep(known, RAW, HEAD)
    assert known.find(RAW) is HEAD


@pytest.mark.parametrize("other", [RAW[:-1], RAW + b"h", b"\r\n" + RAW, RAW.lower(), RAW.replace(b"5", b"6"), b""])
def test_other_bytes_are_another_head(other: bytes) -> None:
    known = RequestHeadCache()
    keep(known, RAW, HEAD)
    assert known.find(other) is None


def test_long_head_is_not_kept() -> None:
    known = RequestHeadCache()
    head = RequestHead("GET", "/", {})
    for size in (1024, 1025):
        keep(known, of_length(size), head)
    assert known.find(of_length(1024)) is head
    assert known.find(of_length(1025)) is None
    assert known.find(of_length(1025)[:1024]) is None


def test_number_of_heads_is_bounded_and_the_latest_is_known() -> None:
    known = RequestHeadCache()
    for number in range(3000):
        keep(known, numbered(number), RequestHead("GET", f"/{number}", {}))
        latest = known.find(numbered(number))
        assert latest is not None
        assert latest.path == f"/{number}"
    assert sum(known.find(numbered(number)) is not None for number in range(3000)) <= 256


def meaning(parse: Callable[..., RequestHead], *arguments: object) -> object:
    try:
        return parse(*arguments)
    except Refused as refused:
        return refused.reply


HOSTS = [(), ("Host: h",), ("Host: a b",), ("Host: a", "Host: b"), ("Host: ",), ("host: [::1]:80",)]
FIELDS = [(), ("X-Trace: 1",), ("Accept:*/*\t",), ("a: b", "A: c"), ("a : b",), ("a: \x01",)]


@pytest.mark.parametrize(
    "ruled",
    [
        *((), ("Content-Length: 5",), ("Content-Length: 0005",), ("Content-Length: +5",), ("Content-Length: ",)),
        *(
            ("Content-Length: " + "1" * 19,),
            ("Content-Length: " + "0" * 19 + "5",),
            ("Content-Length: 5", "Content-Length: 5"),
        ),
        *(("Connection: keep-alive",), ("Connection: Keep-Alive",), ("Connection: close",), ("Connection: x, Close",)),
        *(("Transfer-Encoding: chunked",), ("Transfer-Encoding: gzip",), ("Expect: 100-continue",), ("Expect: x",)),
    ],
)
@pytest.mark.parametrize("line", ["POST /a HTTP/1.1", "GET /b HTTP/1.0", "GET  /b HTTP/1.1", "OPTIONS * HTTP/1.1"])
def test_head_means_in_one_pass_what_it_means_rule_by_rule(line: str, ruled: tuple[str, ...]) -> None:
    for host, fields in product(HOSTS, FIELDS):
        lines = [each.encode() for each in (*host, *ruled, *fields)]
        raw = b"\r\n".join([line.encode(), *lines, b"", b""])
        for most in (100, 2):
            wanted = meaning(_parse_unusual, raw, line.encode(), lines, most)
            for _ in range(2):  # the second time, its lines are known
                assert meaning(parse_head, raw, most) == wanted, raw
