"""Floods of HTTP/2 frames: what a client sent that has left holds up nobody."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from time import monotonic
from typing import Any

import hpack
import httpx

from headrace_testing.serving import serve

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RESET, SETTINGS = 1, 3, 4
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


def test_requests_that_are_reset_by_clients_that_left_hold_up_nobody(tmp_path: Path) -> None:
    """It is 0.3 s. 10 s if every frame that has arrived is served."""
    flood = resets()
    with serve(tmp_path, listen=True, http_server="hypercorn") as server:
        frontends: list[Any] = list(server.frontends)
        (port,) = [each.port for each in frontends if (each.protocol or each.name) == "http"]
        for _ in range(CLIENTS):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(flood)
        began_s = monotonic()
        assert httpx.get(f"http://127.0.0.1:{port}/v2/health/live", timeout=60).status_code == 200
        assert monotonic() - began_s < 4
