"""Compare a response from the cache with one of an identity model: CPU per request, in one process.

    python benchmarks/response_cache.py [--requests 20000] [--rounds 5]

Both models are the same identity; one takes part in the cache. Requests are submitted as frontends submit them, 16 at
a time; models alternate, and the minimum of the rounds counts. The other is measured on a server without a cache, too.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np

from headrace import Answer, InferRequest, Server, Ticket

CONFIG = """backend: "identity" max_batch_size: 16 {rest}
input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }} output {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }}"""
AT_ONCE = 16
FLOATS = {"16 floats": 16, "4 KiB": 1024, "64 KiB": 16384, "1 MiB": 262144}


async def cpu_us(server: Server, model: str, floats: int, requests: int, changing: bool) -> float:
    """Return the CPU of the process per request in microseconds."""
    x = np.zeros((1, floats), np.float32)
    done = asyncio.Event()
    remaining = requests

    def submit() -> None:
        sent = x
        if changing:
            sent = x.copy()
            sent[0, 0] = remaining
        server.submit(Ticket(InferRequest(model, {"x": sent}), respond))

    def respond(answer: Answer, final: bool) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining >= AT_ONCE:
            loop.call_soon(submit)  # as from a socket
        elif remaining <= 0:
            done.set()

    loop = asyncio.get_running_loop()
    before = time.process_time()
    for _ in range(min(AT_ONCE, requests)):
        submit()
    await done.wait()
    return (time.process_time() - before) / requests * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, rest in (("plain", ""), ("cached", "response_cache { enable: true }")):
            (Path(folder) / name / "1").mkdir(parents=True)
            (Path(folder) / name / "config.pbtxt").write_text(CONFIG.format(rest=rest))
        with Server(folder) as without, Server(folder, cache_config={"local": {"size": str(1 << 26)}}) as server:
            cases = {
                "identity, no cache in the server": (without, "plain", False),
                "identity": (server, "plain", False),
                "hit": (server, "cached", False),
                "miss": (server, "cached", True),
            }
            for size, floats in FLOATS.items():
                requests = max(arguments.requests // max(floats // 1024, 1), 200)
                least = dict.fromkeys(cases, float("inf"))
                for _ in range(arguments.rounds):
                    for name, (of, model, changing) in cases.items():
                        took = of._call(cpu_us, of, model, floats, requests, changing)
                        least[name] = min(least[name], took)
                for name, took in least.items():
                    print(f"{size:10} {name:34} {took:9.2f} us   {took / least['identity']:5.2f}")


if __name__ == "__main__":
    main()
