"""Measure the delay between the timeout of a waiting request and its error, with and without load.

    python benchmarks/expiry.py [--requests 400] [--load 16]

One model waits for a batch that is never full, so its requests expire by the timeout of its queue. Meanwhile ``--load``
callers send requests to an identity. Prints the delay of the errors in milliseconds, in this process. For comparison, a
bare timer of the same event loop has the same timeout, and another process sleeps for it: their delays are those of the
loop and of the machine, and the rest is Headrace's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from headrace import Answer, InferRequest, Server, Ticket

SHAPES = 'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }'
#: A model whose batch is never full.
HELD = f"""backend: "identity" max_batch_size: 4096 {SHAPES} dynamic_batching {{
  max_queue_delay_microseconds: 600000000
  default_queue_policy {{
    timeout_action: REJECT default_timeout_microseconds: 60000000 allow_timeout_override: true }} }}"""
X = np.zeros((1, 1), np.float32)
TIMEOUTS_MS = (5, 20, 50, 100)


_SLEEPER = """
import json, sys, time
late = []
for number in range(int(sys.argv[1])):
    timeout_s = (0.005, 0.02, 0.05, 0.1)[number % 4]
    due = time.monotonic() + timeout_s
    time.sleep(timeout_s)
    late.append((time.monotonic() - due) * 1000)
print(json.dumps(late))
"""


async def late_ms(server: Server, requests: int, load: int) -> tuple[list[float], list[float]]:
    """Return the delays of the errors, and the delays of the bare timers."""
    loop = asyncio.get_running_loop()
    late: list[float] = []
    bare: list[float] = []
    done = asyncio.Event()
    is_over = False

    def keep_asking(answer: Answer = None, final: bool = True) -> None:
        if not is_over:
            loop.call_soon(server.submit, Ticket(InferRequest("busy", {"x": X}), keep_asking))

    def ask(timeout_ms: int) -> None:
        due = time.monotonic() + timeout_ms / 1000

        def on_answer(answer: Answer, final: bool) -> None:
            late.append((time.monotonic() - due) * 1000)
            if len(late) == requests:
                done.set()

        loop.call_later(timeout_ms / 1000, lambda: bare.append((time.monotonic() - due) * 1000))
        server.submit(Ticket(InferRequest("held", {"x": X}, timeout_us=timeout_ms * 1000), on_answer))

    for _ in range(load):
        keep_asking()
    for number in range(requests):
        ask(TIMEOUTS_MS[number % len(TIMEOUTS_MS)])
        await asyncio.sleep(0.003)
    await done.wait()
    is_over = True
    return late, bare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--load", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        busy = f'backend: "identity" max_batch_size: 8 {SHAPES} dynamic_batching {{ }}'
        for name, text in (("held", HELD), ("busy", busy)):
            (Path(folder) / name / "1").mkdir(parents=True)
            (Path(folder) / name / "config.pbtxt").write_text(text)
        with Server(folder) as server:
            for load in (0, options.load):
                command = [sys.executable, "-c", _SLEEPER, str(options.requests // 4)]
                with subprocess.Popen(command, stdout=subprocess.PIPE) as sleeper:
                    late, bare = server._call(late_ms, server, options.requests, load)
                    slept = json.loads(sleeper.communicate()[0])
                print(f"{load:3} callers beside: late by {_quantiles(late)}")
                print(f"    a bare timer of the loop: {_quantiles(bare)}; a process that sleeps: {_quantiles(slept)}")


def _quantiles(values: list[float]) -> str:
    ordered = sorted(values)
    shown = {f"p{share}": ordered[min(len(ordered) * share // 100, len(ordered) - 1)] for share in (50, 90, 99)}
    quantiles = ", ".join(f"{name} {value:.2f}" for name, value in shown.items())
    return f"{quantiles}, most {ordered[-1]:.2f}, least {ordered[0]:.2f} ms"


if __name__ == "__main__":
    main()
