"""Floods of HTTP/2 frames: they end their connections, and what a client sent that has left holds up nobody."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import hpack
import httpx
import pytest

from headrace_hypercorn import hypercorn_server
from headrace_testing.serving import serve

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, GOAWAY, UPDATE = 0, 1, 2, 3, 4, 6, 7, 8
ENHANCE_YOUR_CALM = 11
END_STREAM, END_HEADERS = 1, 4
#: The requests that each client resets at once, and the clients.
REQUESTS, CLIENTS = 4000, 30


def frame(kind: int, content: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def resets() -> bytes:
    """Return a connection whose requests are all reset (CVE-2023-44487)."""
    encoder = hpack.Encoder()
    fields = [(":method", "GET"), (":scheme", "http"), (":path", "/v2/health/live"), (":authority", "x")]
    sent = [PREFACE, frame(SETTINGS)]
    for stream in range(1, 2 * REQUESTS, 2):
        sent += [
            frame(HEADERS, encoder.encode(fields), stream, END_STREAM | END_HEADERS),
            frame(RESET, struct.pack(">I", 8), stream),
        ]
    return b"".join(sent)


def unfinished(stream: int) -> bytes:
    """Return a request whose body does not arrive."""
    fields = [(":method", "GET"), (":scheme", "http"), (":path", "/v2/health/live"), (":authority", "x")]
    return frame(HEADERS, hpack.Encoder().encode(fields), stream, END_HEADERS)


FLOODS = {
    "data": frame(DATA, b"", 1),
    "priorities": frame(PRIORITY, bytes(5), 1),
    "settings": frame(SETTINGS),
    "acknowledgements": frame(SETTINGS, b"", 0, 1),
    "pings": frame(PING, bytes(8)),
    "window updates": frame(UPDATE, b"\0\0\0\1", 1),
    "unknown frames": frame(0x77),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serve(tmp_path_factory.mktemp("models"), listen=True, http_server="hypercorn") as server:
        yield server


@pytest.fixture
def port(server: Any) -> int:
    (port,) = [each.port for each in server.frontends if (each.protocol or each.name) == "http"]
    return int(port)


def frames_until_the_end(client: socket.socket) -> list[tuple[int, bytes]]:
    """Return the kinds and contents of all frames until the server ends the connection."""
    received, found = b"", []
    with contextlib.suppress(ConnectionResetError):
        while some := client.recv(1 << 16):
            received += some
    while len(received) >= 9:
        size = int.from_bytes(received[:3], "big")
        found.append((received[3], received[9 : 9 + size]))
        received = received[9 + size :]
    return found


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_its_connection(port: int, name: str) -> None:
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        client.sendall(PREFACE + frame(SETTINGS) + unfinished(1) + FLOODS[name] * 2000)
        client.shutdown(socket.SHUT_WR)
        kind, content = frames_until_the_end(client)[-1]
    assert (kind, content[4:]) == (GOAWAY, struct.pack(">I", ENHANCE_YOUR_CALM))


def test_a_body_is_no_flood(port: int) -> None:
    """Its zeros would be frames without a use if they were read as heads."""
    with httpx.Client(http1=False, http2=True, timeout=60) as client:
        for _ in range(3):
            answer = client.post(f"http://127.0.0.1:{port}/v2/models/x/infer", content=bytes(1 << 20))
            assert answer.status_code == 404


def test_no_task_remains_of_clients_with_too_many_requests(
    server: Any, port: int, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """hypercorn answers requests that are cancelled, as on a busy machine, and waits for ever until that is sent."""
    monkeypatch.setattr(hypercorn_server, "_AGAIN_S", 0)
    (host,) = [each for each in server.frontends if each.name == "hypercorn"]
    sent = PREFACE + frame(SETTINGS) + b"".join(map(unfinished, range(1, 61, 2))) + FLOODS["pings"] * 900
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(6)]
        for client in clients:
            client.sendall(sent)
        for client in clients:
            received = b""
            while frame(PING, bytes(8), 0, 1) not in received:
                received += client.recv(1 << 16)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: not host._server._serving, "hypercorn has ended what served the clients", 20)


def test_requests_that_are_reset_by_clients_that_left_hold_up_nobody(port: int) -> None:
    """It is 0.3 s. 10 s if every frame that has arrived is served."""
    flood = resets()
    for _ in range(CLIENTS):
        with socket.create_connection(("127.0.0.1", port)) as client, contextlib.suppress(ConnectionError):
            client.sendall(flood)
    began_s = monotonic()
    assert httpx.get(f"http://127.0.0.1:{port}/v2/health/live", timeout=60).status_code == 200
    assert monotonic() - began_s < 4
