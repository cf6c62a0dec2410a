"""Which heads are known again, by their bytes alone."""

from __future__ import annotations

import pytest

from penstock.frontends.http.body import DIRECT_BYTES
from penstock.frontends.http.heads import Head, KnownHeads

RAW = b"POST /a HTTP/1.1\r\nContent-Length: 5\r\n\r\n"
HEAD = Head("POST", "/a", {b"content-length": b"5"}, ((b"Content-Length", b"5"),), 5)


def numbered(number: int) -> bytes:
    return b"GET /%d HTTP/1.1\r\n\r\n" % number


def of_length(size: int) -> bytes:
    return b"GET /".ljust(size - 13, b"x") + b" HTTP/1.1\r\n\r\n"


def keep(known: KnownHeads, received: bytes, head: Head) -> None:
    known.keep(memoryview(received), head)


@pytest.mark.parametrize("behind", [b"", b"hel", b"hello", b"hello\r\n\r\nPOST /b"])
def test_head_is_known_by_its_bytes_whatever_came_behind_it(behind: bytes) -> None:
    known = KnownHeads()
    keep(known, RAW + behind, HEAD)
    assert known.find(RAW) is HEAD


@pytest.mark.parametrize("other", [RAW[:-1], RAW + b"h", b"\r\n" + RAW, RAW.lower(), RAW.replace(b"5", b"6"), b""])
def test_other_bytes_are_another_head(other: bytes) -> None:
    known = KnownHeads()
    keep(known, RAW + b"hello", HEAD)
    assert known.find(other) is None


@pytest.mark.parametrize("lines", [b"\r\n", b"\r\n\r\n", b"\n\r\n\r\n", b"\r\n\r\n\r\n\r\n"])
def test_empty_lines_are_never_a_head(lines: bytes) -> None:
    known = KnownHeads()
    keep(known, lines + RAW, HEAD)
    found = [known.find((lines + RAW)[begin:end]) for end in range(len(lines) + 1) for begin in range(end)]
    assert found == [None] * len(found)


@pytest.mark.parametrize(
    "head",
    [
        HEAD._replace(closes=True),
        HEAD._replace(body_bytes=DIRECT_BYTES + 1),
        HEAD._replace(headers={b"transfer-encoding": b"chunked"}),
        HEAD._replace(headers={b"expect": b"100-continue"}),
        HEAD._replace(headers={b"upgrade": b"h2c"}),
    ],
)
def test_head_with_more_behind_it_than_a_short_body_is_not_kept(head: Head) -> None:
    known = KnownHeads()
    keep(known, RAW, head)
    assert known.find(RAW) is None


def test_long_head_is_not_kept() -> None:
    known = KnownHeads()
    head = Head("GET", "/", {}, ())
    for size in (1024, 1025):
        keep(known, of_length(size) + b"\r\n\r\n", head)
    assert known.find(of_length(1024)) is head
    assert known.find(of_length(1025)) is None
    assert known.find(of_length(1025)[:1024]) is None


def test_number_of_heads_is_bounded_and_the_latest_is_known() -> None:
    known = KnownHeads()
    for number in range(3000):
        keep(known, numbered(number), Head("GET", f"/{number}", {}, ()))
        latest = known.find(numbered(number))
        assert latest is not None
        assert latest.path == f"/{number}"
    assert sum(known.find(numbered(number)) is not None for number in range(3000)) <= 256
