"""Callers of HTTP who are too many, too slow, or too much at once, and the same on the metrics port."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

    UnderAttack = Callable[[Headrace], AbstractContextManager[None]]

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n"
READ_BYTES = 64 * 1024
MIB = 1 << 20
#: Impatient enough for a test; the bystander asks every 5 ms.
LIMITS = ("--http-header-timeout-secs=2", "--http-keepalive-timeout-secs=2", "--http-stall-timeout-secs=2",
          "--http-max-connections=200")  # fmt: skip


@pytest.fixture
def impatient(serve_attacked: Callable[..., Headrace]) -> Headrace:
    """A server whose limits are reached in seconds."""
    return serve_attacked(*LIMITS)


@pytest.fixture(params=["http", "metrics"])
def port(request: pytest.FixtureRequest, impatient: Headrace) -> int:
    return impatient.http if request.param == "http" else impatient.ports["Metrics Service"]


@pytest.fixture
def connect() -> Iterator[Callable[..., list[socket.socket]]]:
    """``connect(port, count, sent)``: connections over which something has been sent, closed at the end."""
    with contextlib.ExitStack() as stack:

        def connect(port: int, count: int, sent: bytes = b"") -> list[socket.socket]:
            callers = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(count)]
            for caller in callers:
                with contextlib.suppress(OSError):  # refused already
                    caller.sendall(sent)
            return callers

        yield connect


def is_over(caller: socket.socket) -> bool:
    """Return True if the server has ended the connection. Earlier answers are discarded."""
    try:
        while select.select([caller], [], [], 0)[0]:
            if not caller.recv(1 << 16):
                return True
    except ConnectionResetError:
        return True
    return False


def is_answered(stream: BinaryIO) -> bool:
    """True if an answer of status 200 begins ``stream``; its first line has been read then."""
    return stream.readline().startswith(b"HTTP/1.1 200 ")


def sockets(server: Headrace) -> int:
    """Return the number of sockets that the server has open."""
    count = 0
    for entry in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            count += "socket:" in str(entry.readlink())
    return count


def is_refused(caller: socket.socket) -> bool:
    """Return True if the server has answered 503, or has reset the connection."""
    try:
        return bool(select.select([caller], [], [], 0)[0]) and b" 503 " in caller.recv(1 << 16, socket.MSG_PEEK)
    except ConnectionResetError:
        return True


def binary(size: int) -> bytes:
    """An inference of ``size`` bytes that are answered as they are, without the bytes."""
    tensor = {"name": "IN", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return b"POST /v2/models/huge/infer HTTP/1.1\r\nHost: h\r\nInference-Header-Content-Length: %d\r\n" % len(text) + (
        b"Content-Length: %d\r\n\r\n%s" % (len(text) + size, text)
    )


@pytest.mark.parametrize(
    "rest",
    [b"", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n"],
    ids=["", "upgrade", "expect"],
)
def test_pipelined_requests(
    attacked: Headrace, under_attack: UnderAttack, connect: Callable[..., list[socket.socket]], rest: bytes
) -> None:
    """A thousand requests in one read: all are answered, and no other caller waits."""
    request = LIVE + rest + b"\r\n"
    many = request * (READ_BYTES // len(request))
    with under_attack(attacked):
        for caller in connect(attacked.http, 1, many + LIVE + b"Connection: close\r\n\r\n"):
            with caller.makefile("rb") as stream:
                assert stream.read().count(b"HTTP/1.1 200 ") == READ_BYTES // len(request) + 1


def test_pipelined_scrapes(
    attacked_natively: Headrace, under_attack: UnderAttack, connect: Callable[..., list[socket.socket]]
) -> None:
    scrape = b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n"
    with under_attack(attacked_natively):
        for caller in connect(attacked_natively.ports["Metrics Service"], 1, scrape * 20 + LIVE + b"\r\n"):
            caller.shutdown(socket.SHUT_WR)
            with caller.makefile("rb") as stream:
                assert stream.read().count(b"HTTP/1.1 200 ") == 21


def test_heads_that_never_repeat(
    attacked_natively: Headrace, under_attack: UnderAttack, connect: Callable[..., list[socket.socket]]
) -> None:
    """As large as they may be, and all different."""
    fields = b"".join(b"Field-%03d: %s\r\n" % (number, b"x" * 480) for number in range(120))
    with under_attack(attacked_natively):
        (caller,) = connect(attacked_natively.http, 1)
        for number in range(100):
            caller.sendall(LIVE + b"Number: %d\r\n" % number + fields + b"\r\n")
            assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "noise", [b"\r\n", b"1\r\nx\r\n", b"1;extension=%d\r\nx\r\n" % 10**15], ids=["lines", "chunks", "extensions"]
)
def test_noise_without_end(
    attacked_natively: Headrace, under_attack: UnderAttack, connect: Callable[..., list[socket.socket]], noise: bytes
) -> None:
    """Empty lines, tiny chunks, chunk extensions: refused before they cost anything."""
    head = (
        b""
        if noise == b"\r\n"
        else b"POST /v2/models/huge/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with under_attack(attacked_natively):
        for caller in connect(attacked_natively.http, 2):
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                caller.sendall(head)
                for _ in range(20):
                    caller.sendall(noise * (READ_BYTES // len(noise)))
            with contextlib.suppress(ConnectionResetError), caller.makefile("rb") as stream:
                assert re.match(rb"HTTP/1.1 4\d\d ", stream.read())


def test_answers_that_nobody_reads(
    impatient: Headrace,
    under_attack: UnderAttack,
    connect: Callable[..., list[socket.socket]],
    wait_until: Callable[..., None],
) -> None:
    size = 16 * MIB
    with under_attack(impatient):
        limit = impatient.rss_bytes + 3 * size
        callers = connect(impatient.http, 8, binary(size) + bytes(size))
        wait_until(lambda: impatient.rss_bytes > limit, "the answers are held", 20)
        wait_until(lambda: impatient.rss_bytes < limit, "they are given up", 20)
        for caller in callers:
            wait_until(lambda caller=caller: is_over(caller), "the connection is closed", 20)


def packed(size: int) -> bytes:
    """A request of few bytes with an answer of many: one string, which gzip makes small."""
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["x" * size]}
    body = gzip.compress(json.dumps({"inputs": [tensor]}).encode())
    head = b"POST /v2/models/text/infer HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def test_pipelined_answers_that_nobody_reads(
    attacked: Headrace, under_attack: UnderAttack, connect: Callable[..., list[socket.socket]]
) -> None:
    """The next request is not executed while the answer before it waits: two run, of which the system takes parts."""
    requests, size = 64, 8 * MIB
    (caller,) = connect(attacked.http, 1, packed(size))  # what an allocator keeps of the first time it keeps once
    with caller.makefile("rb") as stream:
        assert is_answered(stream)
    with under_attack(attacked):
        before, executed = attacked.rss_bytes, attacked.metric("nv_inference_exec_count", "text")
        connect(attacked.http, 1, packed(size) * requests)
        select.select([], [], [], 3.0)
        assert 1 <= attacked.metric("nv_inference_exec_count", "text") - executed <= 2
        assert attacked.peak_rss_bytes < before + 10 * size


def test_many_who_do_not_read_make_room_for_each_other(
    serve_attacked: Callable[..., Headrace],
    under_attack: UnderAttack,
    connect: Callable[..., list[socket.socket]],
    wait_until: Callable[..., None],
) -> None:
    """The bytes held for all of them are bounded, and a caller that reads is served meanwhile."""
    size = 8 * MIB
    server = serve_attacked("--http-max-held-size=67108864", "--http-stall-timeout-secs=2")
    with under_attack(server):
        before, others = server.rss_bytes, sockets(server)
        callers = connect(server.http, 24, binary(size) + bytes(size))
        wait_until(lambda: sockets(server) <= others + 10, "most are given up", 20)
        (reader,) = connect(server.http, 1, binary(4 * MIB) + bytes(4 * MIB))
        with reader.makefile("rb") as stream:
            assert is_answered(stream)
            assert len(stream.read(4 * MIB)) == 4 * MIB
        # At once: what is held, what is being executed, and what ended and is not freed yet.
        assert server.peak_rss_bytes < before + 24 * size
        for caller in callers:
            caller.close()


def test_bodies_that_stop_half_way_make_room_for_each_other(
    serve_attacked: Callable[..., Headrace],
    under_attack: UnderAttack,
    connect: Callable[..., list[socket.socket]],
    wait_until: Callable[..., None],
) -> None:
    size = 8 * MIB
    server = serve_attacked("--http-max-held-size=67108864")
    with under_attack(server):
        before = server.rss_bytes
        callers = connect(server.http, 24, binary(size) + bytes(size - 1))
        wait_until(lambda: sum(map(is_refused, callers)) >= 16, "most are refused", 20)
        assert server.peak_rss_bytes < before + 14 * size
        for caller in callers:
            caller.close()


def test_bodies_that_are_announced(
    attacked_natively: Headrace, under_attack: UnderAttack, connect: Callable[..., list[socket.socket]]
) -> None:
    """A gigabyte each, of which little comes: nothing is kept beyond that."""
    with under_attack(attacked_natively):
        before = attacked_natively.rss_bytes
        callers = connect(attacked_natively.http, 200, binary(1 << 30) + bytes(100_000))
        select.select([], [], [], 1.0)
        assert attacked_natively.peak_rss_bytes < before + 200 * 200_000
        for caller in callers:
            caller.close()


def test_an_answer_that_is_read_slowly_arrives(
    impatient: Headrace, connect: Callable[..., list[socket.socket]]
) -> None:
    """Thrice as long as a caller may stand still."""
    size = 32 * MIB
    (caller,) = connect(impatient.http, 1, binary(size) + bytes(size))
    received, pause = 0, 6.0 / 64
    while received < size:
        select.select([], [], [], pause)
        piece = caller.recv(512 * 1024)
        assert piece
        received += len(piece)


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
def test_bodies_that_drip(
    impatient: Headrace,
    under_attack: UnderAttack,
    connect: Callable[..., list[socket.socket]],
    wait_until: Callable[..., None],
    chunked: bool,
) -> None:
    head = binary(MIB)
    if chunked:
        head = re.sub(
            rb"Content-Length: \d+\r\n\r\n.*",
            b"Transfer-Encoding: chunked\r\n\r\n",
            head.replace(b"Inference-Header-", b"X-"),
            flags=re.DOTALL,
        )
    with under_attack(impatient):
        callers = connect(impatient.http, 50, head + (b"10000\r\n" if chunked else b"") + bytes(50_000))

        def drip() -> bool:
            for caller in callers:
                with contextlib.suppress(OSError):
                    caller.send(b"x")
            select.select([], [], [], 0.2)
            return all(map(is_over, callers))

        wait_until(drip, "all are given up", 20)


@pytest.mark.parametrize("sent", [b"", b"GET /v2", LIVE, LIVE + b"\r\n"], ids=["silent", "line", "head", "idle"])
def test_connections_that_wait(
    impatient: Headrace,
    port: int,
    under_attack: UnderAttack,
    connect: Callable[..., list[socket.socket]],
    wait_until: Callable[..., None],
    sent: bytes,
) -> None:
    """For a first byte, for the end of a head, for the next request."""
    with under_attack(impatient):
        callers = connect(port, 150, sent)
        wait_until(lambda: all(map(is_over, callers)), "all are closed", 20)


def test_more_connections_than_there_may_be(
    impatient: Headrace, port: int, under_attack: UnderAttack, connect: Callable[..., list[socket.socket]]
) -> None:
    """New callers are served: those who have been idle for longest give way, or the newest is told to come later."""
    with under_attack(impatient):
        for _ in range(5):
            connect(port, 150, LIVE + b"\r\n")
    assert sockets(impatient) < 230
