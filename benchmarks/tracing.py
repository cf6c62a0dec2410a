"""Measure the cost of tracing, the access log and the audit log per request: ``python benchmarks/tracing.py``.

CPU of the whole process per request to an identity model on the event loop, over HTTP and gRPC, without sockets: a
connection gets the bytes of a request, and the next one when its response is written. Each setting has its own
process; settings alternate, and the minimum of the rounds of 1,000 requests counts.

With ``--bytecodes``, the bytecodes that Python executes per request, on all threads: independent of other programs, and
without code in C.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from time import process_time_ns
from types import FrameType
from typing import Any

import hpack
from frontends import KINDS, Wire, _feed, _frame, _grpc, _http

from headrace import Server, ServerOptions
from headrace.config.option_parts import Restriction, TraceSetting
from headrace_grpc.frontend import Calls, _keepalive, _limits
from headrace_grpc.http2.connection import Connection
from headrace_grpc.http2.connections import Connections
from headrace_grpc.rpc_table import rpcs
from headrace_http.caller_limits import port_limits
from headrace_http.open_connections import NativeConnections
from headrace_http.protocol import HttpProtocol
from headrace_http.routes import Routes
from headrace_logging import AccessLogOptions, AuditLogOptions

ROUND = 1000
_CONFIG = """backend: "identity" max_batch_size: 64
input { name: "INPUT0" data_type: TYPE_FP32 dims: -1 } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: -1 }
parameters { key: "event_loop" value { string_value: "on" } }"""
#: The counts of `count`, by thread.
_BYTECODES: dict[int, int] = {}
_FILE, _SPANS = "triton,file=FOLDER/trace.json", "mode=opentelemetry"
_LOG = "access-log"
#: The words of ``--trace-config``, and ``access-log`` with its sampling. No collector listens.
SETTINGS: dict[str, tuple[str, ...]] = {
    "off": (),
    "file, level OFF": (_FILE,),
    "file, 1 in 1,000": (_FILE, "level=TIMESTAMPS", "rate=1000"),
    "file, all": (_FILE, "level=TIMESTAMPS", "rate=1"),
    "OpenTelemetry, 1 in 1,000": (_SPANS, "opentelemetry,url=http://127.0.0.1:1", "level=TIMESTAMPS", "rate=1000"),
    "OpenTelemetry, all": (_SPANS, "opentelemetry,url=http://127.0.0.1:1", "level=TIMESTAMPS", "rate=1"),
    "another interceptor": ("restricted",),
    "access log": (f"{_LOG}=1",),
    "access log, JSON": (f"{_LOG}=1", "json"),
    "access log, 1 in 100": (f"{_LOG}=100",),
    "access log; another interceptor": (f"{_LOG}=1", "restricted"),
    "audit log": ("audit",),
    "audit log; another interceptor": ("audit", "restricted"),
    "access log; file, 1 in 1,000": (f"{_LOG}=1", _FILE, "level=TIMESTAMPS", "rate=1000"),
}


def _setting(word: str) -> TraceSetting:
    mode, comma, rest = word.partition(",")
    key, _, value = (rest if comma else word).partition("=")
    return TraceSetting(mode if comma else "", key, value)


async def _http_round(connection: Any, wire: Wire, data: bytes) -> None:
    for _ in range(ROUND):
        before = wire.written
        _feed(connection, data)
        while wire.written == before:
            await asyncio.sleep(0)


async def count(run: Callable[[], Awaitable[None]]) -> float:
    """Return the bytecodes of a request of the round ``run``."""
    await asyncio.sleep(0.3)  # the thread of the access log writes
    _BYTECODES.clear()
    sys.settrace(_trace)
    try:
        await run()
    finally:
        sys.settrace(None)
    await asyncio.sleep(0.3)
    return sum(_BYTECODES.values()) / ROUND


def _trace(frame: FrameType, event: str, argument: Any) -> Any:
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    if event == "opcode":
        thread = threading.get_ident()
        _BYTECODES[thread] = _BYTECODES.get(thread, 0) + 1
    return _trace


async def measure(
    server: Server,
    rounds: int,
    counts: bool,
    authorization: str = "",
    header: str = "Authorization",
    certificate: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Return the least µs of CPU for a request over each protocol; if it ``counts``, the bytecodes.

    Requests have ``authorization`` in ``header``, unless it is empty, and use connections with ``certificate``.
    """
    engine = server.engine
    limits = port_limits(engine.options)
    http, http_wire = HttpProtocol(NativeConnections(Routes(engine).dispatch, limits, engine.off_loop_work)), Wire()
    http_wire._extra = {"peername": ("127.0.0.1", 1), "peercert": certificate}  # type: ignore[attr-defined]
    http.connection_made(http_wire)
    request = _http(KINDS["constant"], 1, binary=True)
    if authorization:
        request = request.replace(b"Accept:", f"{header}: {authorization}\r\nAccept:".encode(), 1)

    options = engine.options
    service = Calls(rpcs(engine), options, engine.off_loop_work)
    connections = Connections(service, _limits(options), _keepalive(options))
    grpc, grpc_wire = Connection(connections), Wire()
    grpc_wire._extra = http_wire._extra  # type: ignore[attr-defined]
    grpc.connection_made(grpc_wire)
    _feed(grpc, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"\0\4" + (1 << 30).to_bytes(4, "big")))
    _feed(grpc, _frame(8, 0, 0, ((1 << 31) - 1 - 65535).to_bytes(4, "big")))
    encoder, number = hpack.Encoder(), 1

    async def grpc_round() -> None:
        nonlocal number
        for _ in range(ROUND):
            grpc.sender.window = grpc.allowance._idle_left = connections.turns.left_ns = 1 << 60
            block, body = first if number == 1 else pair
            data = _frame(1, 4, number, block) + _frame(0, 1, number, body)
            number += 2
            before = grpc_wire.written
            _feed(grpc, data)
            while grpc_wire.written == before:
                await asyncio.sleep(0)

    first, pair = (
        (block + encoder.encode([(header.lower(), authorization)] if authorization else []), body)
        for block, body in (_grpc(KINDS["constant"], 1, encoder, learns=True) for _ in range(2))
    )
    least: dict[str, float] = {}
    gc.collect()
    gc.freeze()
    protocols = ("HTTP", partial(_http_round, http, http_wire, request)), ("gRPC", grpc_round)
    for each in range(rounds + 1):
        for title, run in protocols:
            if counts and each:
                least[title] = await count(run)
                continue
            began = process_time_ns()
            await run()
            took = (process_time_ns() - began) / ROUND / 1000
            if each:
                least[title] = min(least.get(title, took), took)
    return least


def run(setting: str, rounds: int, counts: bool) -> dict[str, float]:
    if counts:
        threading.settrace(_trace)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models/numbers/1").mkdir(parents=True)
        (Path(folder) / "models/numbers/config.pbtxt").write_text(_CONFIG)
        words = SETTINGS[setting]
        logged = [int(word.partition("=")[2]) for word in words if word.startswith(_LOG)]
        form: Any = "json" if "json" in words else "text"
        groups: list[Any] = [AccessLogOptions(f"{folder}/access.log", form, sample) for sample in logged]
        groups += [AuditLogOptions(f"{folder}/audit.log")] * ("audit" in words)
        restricted = {"model-repository": Restriction("key", "value")} if "restricted" in words else {}
        others = (_LOG, "json", "restricted", "audit")
        traced = [_setting(word.replace("FOLDER", folder)) for word in words if not word.startswith(others)]
        options = ServerOptions(
            model_repository=(f"{folder}/models",),
            trace_config=tuple(traced),
            plugin_options=groups,
            http_restricted_api=restricted,
            grpc_restricted_protocol=restricted,
        )
        with Server(options) as server:
            return server._call(measure, server, rounds, counts)


def compare(script: str, settings: Iterable[str], options: argparse.Namespace) -> None:
    """Run ``script`` with alternating settings. Print the cost of each, and its ratio to 'off'."""
    rounds = 1 if options.bytecodes else options.rounds
    least: dict[str, dict[str, float]] = {name: {} for name in settings}
    for _ in range(1 if options.bytecodes else options.turns):
        for setting, found in least.items():
            words = [sys.executable, script, f"--setting={setting}", f"--rounds={rounds}"]
            words += ["--bytecodes"] * options.bytecodes
            output = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
            for title, us in json.loads(output).items():
                found[title] = min(found.get(title, us), us)
    unit = "bytecodes" if options.bytecodes else "µs"
    for setting, found in least.items():
        shares = "  ".join(f"{title} {us:7.2f} {unit} {us / least['off'][title]:6.3f}" for title, us in found.items())
        print(f"{shares}  {setting}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--bytecodes", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings with this in their names, beside 'off'")
    parser.add_argument("--setting", choices=SETTINGS, help="this one only, as JSON")
    options = parser.parse_args()
    if options.setting:
        print(json.dumps(run(options.setting, options.rounds, options.bytecodes)))
        return
    compare(__file__, [name for name in SETTINGS if name == "off" or options.only in name], options)


if __name__ == "__main__":
    main()
