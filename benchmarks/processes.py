"""What a request costs in a frontend process and in that of the engine: ``python benchmarks/processes.py``.

CPU per request and bytecodes, in one process and without sockets: what would travel between two is handed over. The
model is an identity on the event loop. ``alone`` is the way of a request in a server without frontend processes,
``frontend`` and ``engine`` are the two halves of its way in one with them; ``together`` is what is asked in one turn of
the loop. The least of many rounds counts. With ``--beside SOURCES``, the ``core/src`` of another commit, both are
asked in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from time import thread_time_ns
from types import FrameType
from typing import Any

from beside import least
from frontends import COUNT, KINDS, Kind, Wire, _http, _two

from headrace import Server
from headrace.engine import Engine
from headrace.frontends.processes.forwarding import Forwarder, ForwardingRoutes
from headrace.frontends.processes.incoming import IncomingInferences
from headrace.ipc.codec import Decoder, Encoder
from headrace.ipc.framing import FrameParser
from headrace.remote_engine import RemoteEngine, RemoteRequests, write_view
from headrace_http.caller_limits import HttpLimits, flagged
from headrace_http.open_connections import NativeConnections
from headrace_http.protocol import HttpProtocol
from headrace_http.routes import Routes

TOGETHER = (1, 16, 64)
CHOSEN = {
    name: KINDS[name]
    for name in ("constant", "new values", "new id, header, values", "strings, new id, header", "sequences")
} | {"two inputs, new id": Kind(_two, id=lambda n: f"request-{n}", model="pairs")}
#: Models, with the data type and the number of their inputs.
MODELS = {"numbers": ("FP32", 1), "strings": ("STRING", 1), "pairs": ("FP32", 2)}
_CONFIG = """backend: "identity" max_batch_size: 64 dynamic_batching {{ }}
parameters {{ key: "event_loop" value {{ string_value: "on" }} }}
"""
_TENSORS = """input {{ name: "INPUT{0}" data_type: TYPE_{1} dims: [ -1 ] }}
output {{ name: "OUTPUT{0}" data_type: TYPE_{1} dims: [ -1 ] }}
"""


class _Tally:
    """Of what all connections were written."""

    written = 0


class _CountedWire(Wire):
    def __init__(self, tally: _Tally) -> None:
        super().__init__()
        self._tally = tally

    def write(self, data: Any) -> None:
        super().write(data)
        self._tally.written += 1


class Clients:
    """``count`` connections to ``routes``, each of which asks once in a `turn`."""

    def __init__(self, engine: Engine, routes: Routes, count: int, requests: list[bytes]) -> None:
        limits = HttpLimits(input_bytes=engine.options.http_max_input_size, **flagged(engine.options))
        connections = NativeConnections(routes.dispatch, limits, engine.large_work)
        self._tally = _Tally()
        self.wires = [_CountedWire(self._tally) for _ in range(count)]
        self._lines = [HttpProtocol(connections) for _ in range(count)]
        for line, wire in zip(self._lines, self.wires, strict=True):
            line.connection_made(wire)
        self._count, self._requests = count, cycle(requests)

    def ask(self) -> None:
        for line, data in zip(self._lines, islice(self._requests, self._count), strict=True):
            line.get_buffer(65536)[: len(data)] = data
            line.buffer_updated(len(data))

    @property
    def answered(self) -> int:
        return self._tally.written


def nothing(offset: int) -> None:
    """Nothing lies in an arena here."""


class Joined:
    """The two halves of a server with frontend processes; what one sends waits until the other is given it."""

    def __init__(self, server: Server) -> None:
        self.asked: list[bytes] = []
        self.told: list[bytes] = []
        codecs = [(Encoder(None, names_models=True), Decoder(None, nothing)) for _ in range(2)]
        self._incoming = IncomingInferences(*codecs[0], server.engine, self.told.append)
        self.requests = RemoteRequests(*codecs[1], self.asked.append)
        self.remote = RemoteEngine(server.options, self.requests)
        for name, offer in server.engine.offered().items():
            self.remote.change(name, offer.versions, [write_view(view) for view in offer.views])
        self.routes = ForwardingRoutes(self.remote, Forwarder(self.asked.append))
        self._there, self._here = FrameParser(), FrameParser()

    def hear_requests(self) -> None:
        messages, self.asked[:] = b"".join(self.asked), ()
        for frame in self._there.feed(messages):
            assert self._incoming.hear(frame, self.told.append)

    def hear_answers(self) -> None:
        messages, self.told[:] = b"".join(self.told), ()
        for frame in self._here.feed(messages):
            self.requests.hear(frame)


Spent = Callable[[], int]


async def alone(clients: Clients, spent: Spent, count: int) -> dict[str, int]:
    """What one turn took."""
    wanted, began = clients.answered + count, spent()
    clients.ask()
    while clients.answered < wanted:
        await asyncio.sleep(0)
    return {"alone": spent() - began}


async def apart(clients: Clients, joined: Joined, spent: Spent, count: int) -> dict[str, int]:
    """What one turn took in either half."""
    wanted, began = clients.answered + count, spent()
    clients.ask()
    while not joined.asked:
        await asyncio.sleep(0)
    sent = spent()
    joined.hear_requests()
    heard = ended = 0
    while clients.answered < wanted:
        while not joined.told:
            await asyncio.sleep(0)
        came = spent()
        joined.hear_answers()
        ended = spent()
        heard += ended - came
    return {"frontend": sent - began + heard, "engine": ended - sent - heard}


class Bytecodes:
    """Counts those of this thread."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> int:
        return self._count

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._count += event == "opcode"
        return self.trace


async def measure(server: Server, rounds: int, chosen: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, kind in CHOSEN.items():
        for protocol in ("HTTP JSON", "HTTP binary"):
            requests = [_http(kind, n, protocol == "HTTP binary") for n in range(COUNT)]
            for count in TOGETHER:
                title = f"{protocol}: {name}: {count} together"
                if chosen not in title:
                    continue
                whole = Clients(server.engine, Routes(server.engine), count, requests)
                joined = Joined(server)
                split = Clients(joined.remote, joined.routes, count, requests)
                bytecodes = Bytecodes()
                for _ in range(4):
                    await alone(whole, thread_time_ns, count)
                    await apart(split, joined, thread_time_ns, count)
                least: dict[str, int] = {}
                gc.collect()
                gc.freeze()
                for _ in range(max(20, rounds // count)):
                    for turn in (alone(whole, thread_time_ns, count), apart(split, joined, thread_time_ns, count)):
                        for half, took in (await turn).items():
                            least[half] = min(least.get(half, took), took)
                sys.settrace(bytecodes.trace)
                counted = await alone(whole, bytecodes, count) | await apart(split, joined, bytecodes, count)
                sys.settrace(None)
                for half, took in least.items():
                    found[f"{title}: {half}"] = took / count / 1000
                    found[f"{title}: {half}, bytecodes"] = counted[half] / count
    return found


def run(rounds: int, chosen: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, inputs) in MODELS.items():
            (Path(folder) / name / "1").mkdir(parents=True)
            tensors = "".join(_TENSORS.format(number, kind) for number in range(inputs))
            (Path(folder) / name / "config.pbtxt").write_text(_CONFIG.format() + tensors)
        with Server(folder, model_control_mode="none") as server:
            return server._call(measure, server, rounds, chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3, help="with --beside")
    parser.add_argument("--only", default="", metavar="TEXT", help="what the kinds that are asked have in their names")
    parser.add_argument("--beside", type=Path, metavar="SOURCES")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rounds, chosen = arguments.rounds, arguments.only
    if arguments.json:
        print(json.dumps(run(rounds, chosen)))
        return
    words = [f"--rounds={rounds}", f"--only={chosen}"]
    theirs, ours = least(__file__, words, arguments.turns, arguments.beside)
    for title in ours:
        if title.endswith("bytecodes"):
            continue
        line = f"{title:64} {ours[title]:7.2f} µs {ours[f'{title}, bytecodes']:7.0f} bytecodes"
        if theirs:
            line += f"   beside {theirs[title]:7.2f} µs {theirs[f'{title}, bytecodes']:7.0f}"
        print(line)


if __name__ == "__main__":
    main()
