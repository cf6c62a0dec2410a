"""Measure the CPU of frontends per request, without sockets: ``python benchmarks/frontends.py``.

It runs in one process, without schedulers and executions: a connection gets the bytes of requests, and the model
returns its input at once. The minimum of many rounds counts. The name of a kind lists the parts in which its requests
differ; constant ones are equal, so the difference is the gain of caches of parsed parts. With ``--beside SOURCES``, the
``core/src`` of another commit, both alternate; the ratio is this commit's to the other's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from time import thread_time_ns
from typing import Any, TypeAlias

import hpack
import numpy as np
import orjson
from beside import least
from tritonclient.grpc import service_pb2 as pb

from headrace import InferResponse, Server, Ticket
from headrace.engine import Engine
from headrace.models.submission import RequestSubmitter
from headrace.models.view import ModelView
from headrace_grpc.frontend import Calls, _keepalive, _limits
from headrace_grpc.http2.connection import Connection
from headrace_grpc.http2.connections import Connections
from headrace_grpc.rpc_table import rpcs
from headrace_http.caller_limits import port_limits
from headrace_http.open_connections import NativeConnections
from headrace_http.protocol import HttpProtocol
from headrace_http.routes import Routes

#: The requests of a kind, more than any cache of the server holds, and the requests of a round.
COUNT, ROUND = 2560, 16
_CONFIG = """backend: "identity" max_batch_size: 64
input [{ name: "INPUT0" data_type: TYPE_%s dims: [ -1 ] optional: true }, { name: "INPUT1" data_type: TYPE_%s
dims: [ -1 ] optional: true }]
output [{ name: "OUTPUT0" data_type: TYPE_%s dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_%s dims: [ -1 ] }]
parameters { key: "event_loop" value { string_value: "on" } }"""
Inputs: TypeAlias = "dict[str, np.ndarray[Any, Any] | list[bytes]]"


class Kind:
    """The parts of requests of one kind, as functions of their number: id, header, parameters, and inputs."""

    def __init__(
        self,
        inputs: Callable[[int], Inputs],
        *,
        id: Callable[[int], str] = lambda n: "",
        header: Callable[[int], str] = lambda n: "",
        parameters: Callable[[int], dict[str, Any]] = lambda n: {},
        model: str = "numbers",
    ) -> None:
        self.inputs, self.id, self.header, self.parameters, self.model = inputs, id, header, parameters, model


def _floats(n: int) -> Inputs:
    return {"INPUT0": np.arange(n % 997, n % 997 + 16, dtype=np.float32) + np.float32(0.25)}


def _same(n: int) -> Inputs:
    return _floats(0)


def _two(n: int) -> Inputs:
    return _floats(n) | {"INPUT1": np.arange(16, dtype=np.float32) - n}


def _sizes(n: int) -> Inputs:
    return {f"INPUT{each}": np.arange(8 + n * 7 % 41 + each, dtype=np.float32) for each in range(2)}


def _strings(n: int) -> Inputs:
    return {"INPUT0": [b"%d words of text" % (n + each) for each in range(4)]}


def _trace(n: int) -> str:
    return f"7f3c-{n:032d}"


def _sequence(n: int) -> dict[str, Any]:
    return {"sequence_id": 1 + n // 8, "sequence_start": n % 8 == 0, "sequence_end": n % 8 == 7}


KINDS = {
    "constant": Kind(_same),
    "new values": Kind(_floats),
    "new id": Kind(_same, id=lambda n: f"request-{n}"),
    "new header": Kind(_same, header=_trace),
    "new id, header, values": Kind(_floats, id=lambda n: f"request-{n}", header=_trace),
    "two inputs, new id, header": Kind(_two, id=lambda n: f"request-{n}", header=_trace),
    "strings": Kind(_strings, model="strings"),
    "strings, new id, header": Kind(_strings, id=lambda n: f"request-{n}", header=_trace, model="strings"),
    "sequences": Kind(_floats, parameters=_sequence),
    "priority, timeout, new id": Kind(
        _floats, id=lambda n: f"request-{n}", parameters=lambda n: {"priority": n % 3, "timeout": 1000 + n}
    ),
    "two inputs of any size": Kind(_sizes),
}


# ---------------------------------------------------------------------- requests as bytes


def _http(kind: Kind, n: int, binary: bool) -> bytes:
    entries, tail = [], []
    for name, data in kind.inputs(n).items():
        is_text = isinstance(data, list)
        entry: dict[str, Any] = {"name": name, "shape": [1, len(data)], "datatype": "BYTES" if is_text else "FP32"}
        if binary:
            raw = b"".join(struct.pack("<I", len(each)) + each for each in data) if is_text else data.tobytes()  # type: ignore[union-attr]
            entry["parameters"] = {"binary_data_size": len(raw)}
            tail.append(raw)
        else:
            entry["data"] = [each.decode() for each in data] if is_text else data.tolist()  # type: ignore[union-attr]
        entries.append(entry)
    parameters = kind.parameters(n) | ({"binary_data_output": True} if binary else {})
    document: dict[str, Any] = {"id": kind.id(n)} if kind.id(n) else {}
    document |= {"inputs": entries} | ({"parameters": parameters} if parameters else {})
    head = json.dumps(document, separators=(",", ":")).encode()
    lines = [f"POST /v2/models/{kind.model}/infer HTTP/1.1", "Host: 127.0.0.1:8000", "User-Agent: client/1.2"]
    lines += ["Accept: */*", f"Content-Type: application/{'octet-stream' if binary else 'json'}"]
    if kind.header(n):
        lines.append(f"x-request-id: {kind.header(n)}")
    if binary:
        lines.append(f"Inference-Header-Content-Length: {len(head)}")
    body = b"".join([head, *tail])
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def _message(kind: Kind, n: int) -> bytes:
    message = pb.ModelInferRequest(model_name=kind.model, id=kind.id(n))
    for name, value in kind.parameters(n).items():
        field = "bool_param" if isinstance(value, bool) else "uint64_param" if name == "priority" else "int64_param"
        setattr(message.parameters[name], field, value)
    for name, data in kind.inputs(n).items():
        is_text = isinstance(data, list)
        message.inputs.add(name=name, shape=[1, len(data)], datatype="BYTES" if is_text else "FP32")
        raw = b"".join(struct.pack("<I", len(each)) + each for each in data) if is_text else data.tobytes()  # type: ignore[union-attr]
        message.raw_input_contents.append(raw)
    return message.SerializeToString()  # type: ignore[no-any-return]


def _grpc(kind: Kind, n: int, encoder: hpack.Encoder, learns: bool) -> tuple[bytes, bytes]:
    """Return a header block, and a message with its prefix. A client that ``learns`` adds new fields to its table."""
    names = [(":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer")]
    names += [(":authority", "127.0.0.1:8001"), ("te", "trailers"), ("content-type", "application/grpc")]
    names += [("user-agent", "grpc-c++/1.54.3 grpc-c/31.0.0 (linux; chttp2)")]
    names += [("grpc-accept-encoding", "identity, deflate, gzip")]
    block = encoder.encode(names, huffman=False)
    if kind.header(n):
        if learns:
            block += encoder.encode([("x-request-id", kind.header(n))], huffman=True)
        else:
            value = kind.header(n).encode()
            block += b"\0" + bytes([12]) + b"x-request-id" + bytes([len(value)]) + value
    body = _message(kind, n)
    return block, struct.pack(">BI", 0, len(body)) + body


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, number) + payload


# ---------------------------------------------------------------------- connections without sockets


class Wire(asyncio.Transport):
    """Collects the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.last: bytes = b""

    def write(self, data: Any) -> None:
        self.written, self.last = self.written + 1, data

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: no request waits here."""

    def pause_reading(self) -> None:
        """Do nothing: there is no socket."""

    def resume_reading(self) -> None:
        """Do nothing: there is no socket to resume."""


class Echo(Engine):
    """Returns the inputs at once."""

    def __init__(self, server: Server) -> None:
        self.__dict__.update(server.engine.__dict__)
        self._views: dict[str, ModelView] = {}
        for name in ("numbers", "strings"):
            self._views[name] = replace(server.engine.resolve(name), enqueue=self._answer)
        self._table = self  # type: ignore[assignment]

    def resolve(self, name: str, version: str | int = "") -> ModelView:
        return self._views[name]

    def submitter(self, single: Any = None, describe: Any = None) -> RequestSubmitter:
        return RequestSubmitter(self.resolve, single)

    @staticmethod
    def _answer(ticket: Ticket) -> None:
        request = ticket.request
        outputs = {f"OUTPUT{name[5:]}": tensor for name, tensor in request.inputs.items()}
        ticket.respond(InferResponse(outputs, {}, request.model_name, "1", request.id), True)  # type: ignore[arg-type]


def _feed(connection: Any, data: bytes) -> None:
    connection.get_buffer(65536)[: len(data)] = data
    connection.buffer_updated(len(data))


def _http_sender(engine: Engine, requests: Sequence[bytes]) -> tuple[Callable[[], None], Wire]:
    limits = port_limits(engine.options)
    connection, wire = HttpProtocol(NativeConnections(Routes(engine).dispatch, limits, engine.off_loop_work)), Wire()
    connection.connection_made(wire)
    endless = cycle(requests)

    def send() -> None:
        for data in islice(endless, ROUND):
            connection.get_buffer(65536)[: len(data)] = data
            connection.buffer_updated(len(data))

    return send, wire


def _grpc_sender(engine: Engine, requests: list[tuple[bytes, bytes]], learns: bool) -> tuple[Callable[[], None], Wire]:
    options = engine.options
    service = Calls(rpcs(engine), options, engine.off_loop_work)
    connections = Connections(service, _limits(options), _keepalive(options))
    connection, wire = Connection(connections), Wire()
    connection.connection_made(wire)
    _feed(connection, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"\0\4" + struct.pack(">I", 1 << 30)))
    _feed(connection, _frame(8, 0, 0, struct.pack(">I", (1 << 31) - 1 - 65535)))
    number = 1
    if not learns:  # the common fields are in the table, and stay there
        _feed(connection, _frame(1, 5, 1, requests[0][0]))
        number, requests[0] = 3, (requests[1][0], requests[0][1])
    endless = cycle(requests)

    def send() -> None:
        nonlocal number
        connection.sender.window = connection.allowance._idle_left = connections.turns.left_ns = 1 << 60
        for block, body in islice(endless, ROUND):
            data = _frame(1, 4, number, block) + _frame(0, 1, number, body)
            number += 2
            connection.get_buffer(65536)[: len(data)] = data
            connection.buffer_updated(len(data))

    return send, wire


def _bare_sender(requests: Sequence[bytes]) -> tuple[Callable[[], None], Wire]:
    """Return the time of the libraries for the same bodies: the minimum of a frontend in Python for JSON."""
    endless, wire = cycle([data.partition(b"\r\n\r\n")[2] for data in requests]), Wire()

    def send() -> None:
        for body in islice(endless, ROUND):
            document, outputs = orjson.loads(body), []
            for entry in document["inputs"]:
                array = np.array(entry["data"], np.float32 if entry["datatype"] == "FP32" else np.object_)
                outputs.append({"name": "OUTPUT0", "datatype": entry["datatype"], "shape": entry["shape"]})
                outputs[-1]["data"] = array.tolist()
            answer = {"id": document.get("id", ""), "model_name": "numbers", "model_version": "1", "outputs": outputs}
            wire.write(orjson.dumps(answer))

    return send, wire


def senders(engine: Engine, chosen: str) -> Iterator[tuple[str, Callable[[], None], Wire]]:
    for name, kind in KINDS.items():
        for protocol in ("HTTP binary", "HTTP JSON", "gRPC", "gRPC, learning"):
            title = f"{protocol}: {name}"
            if chosen not in title or (protocol == "gRPC, learning" and not kind.header(1)):
                continue
            if protocol.startswith("HTTP"):
                requests = [_http(kind, n, protocol == "HTTP binary") for n in range(COUNT)]
                yield title, *_http_sender(engine, requests)
                if protocol == "HTTP JSON":
                    yield f"JSON, orjson and NumPy alone: {name}", *_bare_sender(requests)
            else:
                encoder = hpack.Encoder()
                pairs = [_grpc(kind, n, encoder, "learning" in protocol) for n in range(COUNT)]
                yield title, *_grpc_sender(engine, pairs, "learning" in protocol)


async def measure(server: Server, rounds: int, chosen: str, shows: bool) -> dict[str, float]:
    """Return the minimum µs of a request of each kind."""
    engine = Echo(server)
    least: dict[str, float] = {}
    all_of_them = list(senders(engine, chosen))
    for title, send, wire in all_of_them:
        before = wire.written
        send()
        if wire.written - before != ROUND:
            raise SystemExit(f"{title}: {wire.written - before} answers to {ROUND} requests: {wire.last!r}")
        if shows:
            print(title, wire.last, file=sys.stderr)
        send()
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(rounds):
        for title, send, _ in all_of_them:
            began = thread_time_ns()
            send()
            took = (thread_time_ns() - began) / ROUND / 1000
            least[title] = min(least.get(title, took), took)
        gc.collect(0)
    gc.enable()
    return least


def run(rounds: int, chosen: str, shows: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in (("numbers", "FP32"), ("strings", "STRING")):
            (Path(folder) / name / "1").mkdir(parents=True)
            (Path(folder) / name / "config.pbtxt").write_text(_CONFIG % ((kind,) * 4))
        with Server(folder, http_header_forward_pattern="", model_control_mode="none") as server:
            return server._call(measure, server, rounds, chosen, shows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--turns", type=int, default=3, help="with --beside")
    parser.add_argument("--only", default="", metavar="TEXT", help="what the kinds that are asked have in their names")
    parser.add_argument("--beside", type=Path, metavar="SOURCES")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", action="store_true", help="an answer to each kind")
    options = parser.parse_args()
    if options.json or options.beside is None:
        found = run(options.rounds, options.only, options.show)
        print(json.dumps(found) if options.json else "\n".join(f"{us:7.2f} µs  {name}" for name, us in found.items()))
        return
    words = [f"--rounds={options.rounds}", f"--only={options.only}"]
    theirs, ours = least(__file__, words, options.turns, options.beside)
    for name, us in ours.items():
        print(f"{theirs[name]:7.2f} {us:7.2f} µs  {us / theirs[name]:5.2f}  {name}")


if __name__ == "__main__":
    main()
