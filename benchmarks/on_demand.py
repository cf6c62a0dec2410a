"""Many clients, many models and a small memory: ``python benchmarks/on_demand.py``.

100 clients send requests to 20 models in random order, of which 5 fit into the budget. Models are in processes, or ONNX
models in the server (``--kind``). Exits with an error if a request fails, if a model is loaded twice at once, if memory
exceeds the budget by more than 5 %, or if a request to an unloaded model for which there is room takes more than 1.2
times a load in mode ``explicit``. Needs headrace-on-demand, and headrace-python or headrace-onnx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import servers

#: The allowed excess of the budget, and the allowed time of a first request over a load in mode explicit.
EXCESS, WAIT = 1.05, 1.2
_PYTHON = """backend: "python" input {{ name: "x" data_type: TYPE_FP32 dims: 1 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}"""
#: Writes its loads and unloads to a file: the oracle for the server's state.
_MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def note(self, what):
        with open({notes!r}, "a") as notes:
            notes.write(f"{{what}} {name}\\n")

    def initialize(self, args):
        self.note("begin")
        self.weights = np.ones({size}, np.uint8)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
                for r in requests]

    def finalize(self):
        self.note("end")
"""


@dataclass
class Result:
    """The results of the clients."""

    answers: int = 0
    errors: list[str] = field(default_factory=list)
    most_bytes: int = 0


def write_process_models(folder: Path, count: int, size: int) -> Path:
    """Write Python models that have ``size`` bytes each. Return the file of their loads and unloads."""
    notes = folder.parent / "notes"
    notes.write_text("")
    for number in range(count):
        version = folder / f"m{number}/1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_MODEL.format(notes=str(notes), name=f"m{number}", size=size))
        (version.parent / "config.pbtxt").write_text(_PYTHON.format())
    return notes


def write_onnx_models(folder: Path, count: int, size: int) -> None:
    """Write ONNX models with ``size`` bytes of weights each."""
    from onnx import TensorProto, helper, numpy_helper, save

    for number in range(count):
        weights = np.ones((256, size // 1024), np.float32)
        graph = helper.make_graph(
            [
                helper.make_node("Expand", ["x", "shape"], ["wide"]),
                helper.make_node("MatMul", ["wide", "w"], ["h"]),
                helper.make_node("ReduceSum", ["h", "axis"], ["y"], keepdims=0),
            ],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
            [
                numpy_helper.from_array(weights, "w"),
                numpy_helper.from_array(np.array([256], np.int64), "shape"),
                numpy_helper.from_array(np.array([0], np.int64), "axis"),
            ],
        )
        version = folder / f"m{number}/1"
        version.mkdir(parents=True)
        save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), version / "model.onnx"
        )


def double_loads(notes: Path) -> list[str]:
    """Return the models that began to load while they were loaded."""
    loaded, twice = set[str](), list[str]()
    for line in notes.read_text().splitlines():
        what, name = line.split()
        if what == "begin" and name in loaded:
            twice.append(name)
        (loaded.add if what == "begin" else loaded.discard)(name)
    return twice


async def infer(port: int, name: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}).encode()
        head = f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: x\r\nConnection: close"
        writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        return int(answer.split(None, 2)[1]), answer
    finally:
        writer.close()


async def ask(port: int, pid: int, models: int, clients: int, seconds: float, base: int | None) -> Result:
    """Run ``clients`` that send requests to random models for ``seconds``.

    ``base`` is the server's memory without models; for None, the memory of its children counts.
    """
    result, ends = Result(), time.monotonic() + seconds

    async def client(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < ends:
            status, answer = await infer(port, f"m{draw.randrange(models)}")
            result.answers += 1
            if status != 200:
                result.errors.append(answer.decode(errors="replace")[-300:])

    async def watch() -> None:
        while time.monotonic() < ends:
            used = await asyncio.to_thread(memory, pid, base)
            result.most_bytes = max(result.most_bytes, used)
            await asyncio.sleep(0.05)

    await asyncio.gather(watch(), *(client(seed) for seed in range(clients)))
    return result


def memory(pid: int, base: int | None) -> int:
    """Return the growth of the server beyond ``base``, or the memory of its children."""
    server = psutil.Process(pid)
    if base is not None:
        return int(server.memory_info().rss) - base
    total = 0
    for child in server.children(recursive=True):
        try:
            if "child_main" in " ".join(child.cmdline()):
                total += child.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def metric(port: int, name: str) -> float:
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} "))


def first_requests(folder: Path, count: int) -> tuple[float, float]:
    """Return the median time of a load in mode ``explicit`` with a request, and of a first request, in s."""
    explicit, on_demand = list[float](), list[float]()
    with (
        servers.headrace(folder, "--model-control-mode=explicit") as loading,
        servers.headrace(folder, "--model-control-mode=on-demand") as waiting,
    ):
        for number in range(count):  # alternating, because other work on the machine slows both
            name = f"m{number}"
            began = time.perf_counter()
            url = f"http://127.0.0.1:{loading.http}/v2/repository/models/{name}/load"
            urllib.request.urlopen(urllib.request.Request(url, method="POST")).read()
            _require(asyncio.run(infer(loading.http, name)))
            between = time.perf_counter()
            _require(asyncio.run(infer(waiting.http, name)))
            explicit.append(between - began)
            on_demand.append(time.perf_counter() - between)
    return median(explicit[1:]), median(on_demand[1:])


def _require(answer: tuple[int, bytes]) -> None:
    if answer[0] != 200:
        raise RuntimeError(f"an inference failed: {answer[1].decode(errors='replace')}")


def run(kind: str, models: int, fits: int, clients: int, seconds: float, size: int) -> list[str]:
    """Measure one kind of model, print the figures, and return the failures."""
    wrong = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "models"
        notes = write_process_models(folder, models, size) if kind == "process" else None
        if notes is None:
            write_onnx_models(folder, models, size)
        with servers.headrace(folder, "--model-control-mode=on-demand") as server:  # the memory of one model
            before = psutil.Process(server.pid).memory_info().rss
            for number in range(2):
                asyncio.run(infer(server.http, f"m{number}"))
            base = None if notes is not None else psutil.Process(server.pid).memory_info().rss - 2 * size
            one = memory(server.pid, None) // 2 if notes is not None else size
            shown_base = 0 if base is None else base - before
        budget = int(one * (fits + 0.5))
        flags = (f"--on-demand-memory={budget}", "--on-demand-wait=120")
        if notes is not None:
            notes.write_text("")
        with servers.headrace(folder, "--model-control-mode=on-demand", *flags) as server:
            result = asyncio.run(ask(server.http, server.pid, models, clients, seconds, base))
            loads = metric(server.metrics, "headrace_on_demand_loads_total")
            evictions = metric(server.metrics, "headrace_on_demand_evictions_total")
        if notes is not None and (twice := double_loads(notes)):
            wrong.append(f"{kind}: loaded while it was loaded: {twice}")
        share = result.most_bytes / budget
        sizes = f"{models} models of {one / 2**20:.0f} MiB, {budget / 2**20:.0f} MiB for all"
        print(f"{kind}: {clients} clients, {sizes}, {seconds:g} s")
        print(f"  {result.answers} answers, {len(result.errors)} errors, {loads:.0f} loads, {evictions:.0f} evictions")
        print(f"  the most memory: {share:.2f} of the budget (the engine itself: {shown_base / 2**20:.0f} MiB)")
        explicit, first = first_requests(folder, min(models, 9))
        print(f"  a first request: {first * 1e3:.0f} ms, {first / explicit:.2f} of load and request in mode explicit")
        wrong += [f"{kind}: {len(result.errors)} requests failed: {result.errors[0]}"] if result.errors else []
        wrong += [f"{kind}: {share:.2f} of the budget was used"] if share > EXCESS else []
        wrong += [f"{kind}: a first request takes {first / explicit:.2f} of a load"] if first > WAIT * explicit else []
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("process", "thread"), action="append")
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--fits", type=int, default=5, help="models that fit into the budget")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--size", type=int, default=32, help="MiB of a model beside its process")
    options = parser.parse_args(words)
    wrong = []
    for kind in options.kind or ("process", "thread"):
        wrong += run(kind, options.models, options.fits, options.clients, options.seconds, options.size << 20)
    for each in wrong:
        print(f"WRONG {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
