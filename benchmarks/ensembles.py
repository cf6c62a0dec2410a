"""Measure the cost of another step in an ensemble: ``python benchmarks/ensembles.py``.

Callers in this process alternate between an identity and ensembles of one and three identities. Prints CPU per request,
with instances on threads, and on the event loop. The minimum of the rounds counts. Needs ``headrace-ensemble``.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from headrace import Answer, InferRequest, InferResponse, Server, Ticket

CALLERS = (1, 16, 64)
MODELS = ("first", "second", "third")
_SHAPES = """max_batch_size: 64
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
ROW = np.ones((1, 16), np.float32)


def write(folder: Path, event_loop: str) -> None:
    """Three identities, and ensembles of the first one and of all."""
    identity = f"""backend: "identity" dynamic_batching {{ }} instance_group {{ count: 1 kind: KIND_CPU }}
    parameters {{ key: "event_loop" value {{ string_value: "{event_loop}" }} }}"""
    configs = dict.fromkeys(MODELS, identity) | {"one step": _ensemble(MODELS[:1]), "three steps": _ensemble(MODELS)}
    for name, config in configs.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(_SHAPES + config)


def _ensemble(models: Sequence[str]) -> str:
    tensors = ["x", *(f"after {model}" for model in models[:-1]), "y"]
    steps = [
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "x" value: "{reads}" }} '
        f'output_map {{ key: "y" value: "{writes}" }} }}'
        for model, (reads, writes) in zip(models, pairwise(tensors), strict=True)
    ]
    return f'platform: "ensemble" ensemble_scheduling {{ {" ".join(steps)} }}'


async def cpu_us(server: Server, model: str, requests: int, callers: int, users: int = 0) -> float:
    """Return the CPU of the process per request in us. With ``users``, requests have the parameter ``user``."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    remaining = requests

    def ask() -> None:
        parameters = {"user": remaining % users} if users else {}
        server.submit(Ticket(InferRequest(model, {"x": ROW}, parameters=parameters), on_answer))

    def on_answer(answer: Answer, final: bool) -> None:
        nonlocal remaining
        if not isinstance(answer, InferResponse):
            raise SystemExit(f"{model}: {answer}")
        remaining -= 1
        if remaining >= callers:
            loop.call_soon(ask)  # as from a socket
        elif not remaining:
            done.set()

    before = time.process_time()
    for _ in range(callers):
        ask()
    await done.wait()
    return (time.process_time() - before) / requests * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    models = ("first", "one step", "three steps")
    for where, event_loop in (("threads", "off"), ("event loop", "on")):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), event_loop)
            with Server(folder) as server:
                for callers in CALLERS:
                    least = dict.fromkeys(models, float("inf"))
                    for _ in range(options.rounds):
                        for model in models:
                            took = server._call(cpu_us, server, model, options.requests, callers)
                            least[model] = min(least[model], took)
                    alone, one, three = least.values()
                    print(
                        f"{where:10} {callers:3} callers: a model {alone:6.1f} µs, ensembles of one and three steps "
                        f"{one:6.1f} and {three:6.1f} µs; {(three - one) / 2:5.1f} for a further step"
                    )


if __name__ == "__main__":
    main()
