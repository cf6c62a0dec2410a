"""Measure the cost of an event of generate_stream beyond its model: ``python benchmarks/generate_streams.py``.

16 clients read streams of a decoupled Python model, which runs in a thread of the server. The CPU of the server per
event is compared with the same model without a frontend (`Engine.responses`); both alternate. The minimum of several
rounds counts. Needs headrace-generate and headrace-python.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from time import process_time_ns

import numpy as np
import psutil
import servers
from event_streams import read_events

from headrace import InferRequest, Server

STREAMS, EVENTS = 16, 500
#: The target for the cost of generate_stream beyond the model.
TARGET_US = 25.0
_CONFIG = """backend: "python" model_transaction_policy { decoupled: true }
input { name: "text" data_type: TYPE_STRING dims: 1 } output { name: "token" data_type: TYPE_STRING dims: 1 }
parameters { key: "isolation" value { string_value: "thread" } }
"""
_MODEL = f"""
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range({EVENTS}):
                token = pb_utils.Tensor("token", np.array([b"token %d" % number], object))
                sender.send(pb_utils.InferenceResponse([token]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def repository(folder: Path) -> Path:
    (folder / "tokens/1").mkdir(parents=True)
    (folder / "tokens/config.pbtxt").write_text(_CONFIG)
    (folder / "tokens/1/model.py").write_text(_MODEL)
    return folder


async def read_streams(port: int, rounds: int) -> int:
    """Read the streams of `STREAMS` connections at once, ``rounds`` times. Return the number of events."""
    return await read_events(port, "/v2/models/tokens/generate_stream", {"text": "Once upon"}, STREAMS, rounds)


def served_us(folder: Path, rounds: int) -> float:
    """Return the CPU of a server per event."""
    with servers.headrace(folder) as running:
        asyncio.run(read_streams(running.http, 1))
        process, least = psutil.Process(running.pid), float("inf")
        for _ in range(rounds):
            before = process.cpu_times()
            count = asyncio.run(read_streams(running.http, 2))
            if count != 2 * STREAMS * EVENTS:
                raise SystemExit(f"{count} events instead of {2 * STREAMS * EVENTS}")
            after = process.cpu_times()
            took_s = after.user + after.system - before.user - before.system
            least = min(least, took_s * 1e6 / count)
    return least


def alone_us(folder: str, rounds: int) -> float:
    """Return the CPU of the model per response, without a frontend, in another process."""
    with Server(folder) as server:

        async def ask() -> None:
            async def one() -> None:
                inputs = {"text": np.array([b"Once upon"], object)}
                async for _ in server.engine.responses(InferRequest("tokens", inputs)):
                    pass

            await asyncio.gather(*(one() for _ in range(STREAMS)))

        least = float("inf")
        for _ in range(rounds):
            before = process_time_ns()
            for _ in range(2):
                server._call(ask)
            least = min(least, (process_time_ns() - before) / 1000 / (2 * STREAMS * EVENTS))
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name, get_context("spawn").Pool(1) as pool:
        folder = repository(Path(name))
        model_us = pool.apply(alone_us, (name, rounds))
        stream_us = served_us(folder, rounds)
    beyond_us = stream_us - model_us
    print(
        f"{STREAMS} streams: {stream_us:.1f} µs per event, the model alone {model_us:.1f} µs: {beyond_us:.1f} µs more"
    )
    sys.exit(beyond_us > TARGET_US)


if __name__ == "__main__":
    main()
