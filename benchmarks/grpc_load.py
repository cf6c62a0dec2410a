"""Sends unary inferences over gRPC that all differ: in the id, a trace id in the metadata, and the values.

    python benchmarks/grpc_load.py PORT MODEL INPUTS --connections 16 --seconds 3 [--constant]

perf_analyzer repeats one request, which favours a server that caches parsed requests. Prints one line of JSON. A
connection has one request at a time. Implements only the HTTP/2 that this needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import struct
from collections.abc import Iterator
from time import perf_counter_ns
from typing import cast

import hpack
import numpy as np
import uvloop
from tritonclient.grpc import service_pb2 as pb

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ENDS, _ACK = 1, 1
_MOST = 2**31 - 1
_FIELDS = (
    *((":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer")),
    *((":authority", "127.0.0.1"), ("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "load/1")),
)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(model: str, inputs: list[str], number: int) -> bytes:
    """Return a framed request with 16 floats per input, unique by ``number``; below 0, it has no id."""
    sent = pb.ModelInferRequest(model_name=model, id=f"request-{number}" if number >= 0 else "")
    for name in inputs:
        sent.inputs.add(name=name, datatype="FP32", shape=[1, 16])
        sent.raw_input_contents.append((np.arange(16, dtype=np.float32) + max(number, 0) % 997).tobytes())
    body = sent.SerializeToString()
    return struct.pack(">BI", 0, len(body)) + cast("bytes", body)


def varied(model: str, inputs: list[str]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the unique header and the message of each request, without end, more than any server caches."""
    made = [message(model, inputs, number) for number in range(4096)]
    number = 0
    while True:
        yield b"\0\x0cx-request-id\x20%032d" % number, made[number % len(made)]
        number += 1


def constant(model: str, inputs: list[str]) -> Iterator[tuple[bytes, bytes]]:
    one = b"", message(model, inputs, -1)
    while True:
        yield one


class Load:
    """The state that all connections share."""

    def __init__(self, requests: Iterator[tuple[bytes, bytes]], fields: tuple[tuple[str, str], ...]) -> None:
        self.requests, self.fields = requests, fields
        self.is_over = False
        self.took_ns: list[int] = []
        self.failure = ""


class Connection(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self._load = load
        self._rest = b""
        self._stream, self._sent_ns, self._has_data = -1, 0, False
        encoder = hpack.Encoder()
        self._first, self._block = (encoder.encode(list(load.fields), huffman=False) for _ in range(2))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is no subclass
        window = struct.pack(">HI", 4, _MOST)
        hello = frame(_SETTINGS, 0, 0, window) + frame(8, 0, 0, struct.pack(">I", _MOST - 65535))
        self._transport.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + hello)
        self._send()

    def _send(self) -> None:
        own, body = next(self._load.requests)
        self._stream += 2
        block, self._first = self._first or self._block, b""
        self._has_data, self._sent_ns = False, perf_counter_ns()
        self._transport.write(frame(_HEADERS, 4, self._stream, block + own) + frame(_DATA, _ENDS, self._stream, body))

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at = 0
        while at + 9 <= len(data):
            end = at + 9 + int.from_bytes(data[at : at + 3], "big")
            if end > len(data):
                break
            kind, flags = data[at + 3], data[at + 4]
            if kind == _DATA:
                self._has_data = True
            elif kind == _HEADERS and flags & _ENDS:
                self._answered()
            elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                self._transport.write(frame(kind, _ACK, 0, data[at + 9 : end] if kind == _PING else b""))
            elif kind in (_RESET, _GOAWAY):
                self._fail(f"a frame of kind {kind}")
            at = end
        self._rest = data[at:]

    def _answered(self) -> None:
        load = self._load
        load.took_ns.append(perf_counter_ns() - self._sent_ns)
        if not self._has_data:
            self._fail("a request was answered by a status alone")
        elif not load.is_over:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._load.is_over:
            self._fail("the server closed the connection")

    def _fail(self, why: str) -> None:
        self._load.failure = self._load.failure or why


async def run(
    port: int, requests: Iterator[tuple[bytes, bytes]], connections: int, seconds: float, authorization: str = ""
) -> dict[str, float]:
    """Return requests per second, and latencies in microseconds. Raises `SystemExit` if a request was not answered.

    Requests have the header ``authorization``, unless it is empty.
    """
    own = (("authorization", authorization),) if authorization else ()
    load, loop = Load(requests, (*_FIELDS, *own)), asyncio.get_running_loop()
    began = perf_counter_ns()
    for _ in range(connections):
        await loop.create_connection(lambda: Connection(load), "127.0.0.1", port)
    await asyncio.sleep(seconds)
    load.is_over, took = True, sorted(load.took_ns)
    took_s = (perf_counter_ns() - began) / 1e9
    if load.failure or len(took) < 2:
        raise SystemExit(load.failure or "nothing was answered")
    p50, p99 = statistics.median(took), took[len(took) * 99 // 100]
    return {"rps": len(took) / took_s, "p50_us": p50 / 1e3, "p99_us": p99 / 1e3, "requests": len(took)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("inputs", help="names, with commas between them")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--constant", action="store_true", help="the same request again and again, without an id")
    parser.add_argument("--authorization", default="", help="the value of a header of this name")
    options = parser.parse_args()
    kind = constant if options.constant else varied
    requests = kind(options.model, options.inputs.split(","))
    load = run(options.port, requests, options.connections, options.seconds, options.authorization)
    print(json.dumps(uvloop.run(load)))


if __name__ == "__main__":
    main()
