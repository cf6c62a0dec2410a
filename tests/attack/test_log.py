"""Nonsense in quantity: whatever a peer sends, it makes the server write little, and every line of it is a record."""

from __future__ import annotations

import contextlib
import random
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

    Under = Callable[[Headrace], AbstractContextManager[None]]

#: Sent in each attack, and what the log may grow by in the meantime: about ten lines with tracebacks of each kind.
SENT_BYTES, LOG_BYTES = 128 * 1024, 64 * 1024
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
RECORD = re.compile(r'^[IWEV]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ \w+\.py:\d+\] ".*"$|^([|+].*[|+])?$')


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """RFC 9113 section 4.1."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header that is not indexed: RFC 7541 section 6.2.2, without Huffman, below 127 bytes."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


def call(path: bytes) -> bytes:
    heads = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"))
    more = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return b"".join(literal(name, value) for name, value in heads + more)


def noise(chance: random.Random, size: int) -> bytes:
    return chance.randbytes(size)


def requests(chance: random.Random) -> Iterator[bytes]:
    """HTTP/1.1 requests that are one mistake away from right."""
    bodies = (
        b"{",
        b"NaN",
        b'{"inputs":[]}',
        b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":["x"]}]}',
        b"\xff\xfe",
    )
    paths = (
        "/v2/models/echo/infer",
        "/v2/models/%0a/infer",
        "/v2/repository/index",
        "/v2/repository/models/x/load",
        "/\x1b[31m",
    )
    while True:
        body, path = chance.choice(bodies), chance.choice(paths)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nX: \x9b{chance.random()}\r\n"
        if chance.random() < 0.3:
            head += "Inference-Header-Content-Length: 7\r\n"
        if chance.random() < 0.3:
            head += f"Content-Encoding: {chance.choice(('gzip', 'deflate', 'br'))}\r\n"
        yield head.encode("latin-1") + b"\r\n" + body


def calls(chance: random.Random) -> Iterator[bytes]:
    """gRPC calls whose messages mean nothing, after a preface that is right."""
    yield PREFACE + frame(4, 0, 0, b"")
    methods = (b"ModelInfer", b"ModelStreamInfer", b"ServerLive", b"RepositoryModelLoad", b"Nope")
    for stream in range(1, 1 << 20, 2):
        path = b"/inference.GRPCInferenceService/" + chance.choice(methods)
        message = noise(chance, chance.randrange(40))
        data = bytes((chance.choice((0, 0, 0, 1, 7)),)) + len(message).to_bytes(4, "big") + message
        yield frame(1, 4, stream, call(path)) + frame(0, 1, stream, data)


def frames_of_noise(chance: random.Random) -> Iterator[bytes]:
    """Frames of every kind with anything in them, each on a connection that begins well."""
    while True:
        body = noise(chance, chance.randrange(60))
        yield (
            PREFACE
            + frame(4, 0, 0, b"")
            + frame(chance.randrange(12), chance.randrange(256), chance.randrange(9), body)
        )


def upgrades(chance: random.Random) -> Iterator[bytes]:
    """Requests that want to speak something else, as many as one read takes."""
    while True:
        yield b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n" * 980


def bytes_of_noise(chance: random.Random) -> Iterator[bytes]:
    while True:
        yield noise(chance, 400)


KINDS: dict[str, tuple[str, Callable[[random.Random], Iterator[bytes]], bool]] = {
    "pipelined requests": ("HTTPService", requests, True),
    "upgrades": ("HTTPService", upgrades, True),
    "requests": ("HTTPService", requests, False),
    "noise over http": ("HTTPService", bytes_of_noise, False),
    "frames over http": ("HTTPService", frames_of_noise, False),
    "calls": ("GRPCInferenceService", calls, True),
    "frames": ("GRPCInferenceService", frames_of_noise, False),
    "noise over grpc": ("GRPCInferenceService", bytes_of_noise, False),
    "requests over grpc": ("GRPCInferenceService", requests, False),
    "metrics": ("Metrics Service", requests, True),
}


def flood(port: int, pieces: Iterator[bytes], is_one_connection: bool) -> None:
    """Send `SENT_BYTES` of ``pieces``, on one connection for as long as that is heard, or one after the other on one
    each: it is the log that is attacked here, not the number of connections."""
    sent = 0
    while sent < SENT_BYTES:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as caller, contextlib.suppress(OSError):
            while sent < SENT_BYTES:
                piece = next(pieces)
                sent += len(piece)
                caller.sendall(piece)
                if not is_one_connection:
                    caller.shutdown(socket.SHUT_WR)
                    while caller.recv(1 << 16):
                        pass
                    break
                with contextlib.suppress(BlockingIOError):
                    caller.setblocking(False)
                    if not caller.recv(1 << 16):
                        break  # it was closed
                caller.settimeout(5)


@pytest.mark.usefixtures("of_its_own")
@pytest.mark.parametrize("service", sorted({service for service, _, _ in KINDS.values()}))
def test_nonsense_makes_few_lines(attacked: Headrace, under_attack: Under, service: str) -> None:
    """All kinds of one port together write no more than what one may."""
    before = len(attacked.log)
    with under_attack(attacked):
        for name, make, is_one_connection in KINDS.values():
            if name == service:
                flood(attacked.ports[name], make(random.Random(7)), is_one_connection)
    attacked.finish(15)  # how it ends is the subject of others
    written = attacked.log[before:]
    assert len(written) <= LOG_BYTES, written[:2000]
    for line in written.split("\n"):
        assert RECORD.match(line), line
        assert line.isprintable(), line
