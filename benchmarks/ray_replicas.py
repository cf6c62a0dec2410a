"""Measure the cost of Ray's router: one bare server, and one, two and four replicas of Ray Serve, on this machine.

    python benchmarks/ray_replicas.py --seconds 8

A request has 16 floats as JSON, for an identity model; wrk sends them. CPU is that of all processes of the server, or
of Ray with its router, its controller and its replicas; not that of wrk. `headrace-ray` and wrk must be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

HTTP_PORT = 18970
CONFIG = """
backend: "identity" max_batch_size: 64
input { name: "x" data_type: TYPE_FP32 dims: [16] }
output { name: "y" data_type: TYPE_FP32 dims: [16] }
"""
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}]})
PATH = f"http://127.0.0.1:{HTTP_PORT}/v2/models/identity/infer"
SCRIPT = f"wrk.method='POST'\nwrk.headers['Content-Type']='application/json'\nwrk.body='{BODY}'\n"
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--connections", type=int, nargs="*", default=[1, 16, 64])
    arguments = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
    print(
        "| | connections | requests/s | CPU, ms a request | p50, ms | p99, ms | errors |\n|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        models, script = Path(folder) / "models", Path(folder) / "post.lua"
        (models / "identity/1").mkdir(parents=True)
        (models / "identity/config.pbtxt").write_text(CONFIG)
        script.write_text(SCRIPT)
        with bare(models):
            for connections in arguments.connections:
                show("one bare server", connections, measure(script, connections, arguments.seconds))
        for count in arguments.replicas:
            with replicas(models, count) as handle:
                show(f"Ray, {count} replicas, by handle", 1, measure_handle(handle, arguments.seconds))
                for connections in arguments.connections:
                    show(f"Ray, {count} replicas", connections, measure(script, connections, arguments.seconds))


@contextmanager
def bare(models: Path) -> Iterator[None]:
    """Run ``headrace serve``."""
    words = ("--http-address=127.0.0.1", f"--http-port={HTTP_PORT}", "--allow-grpc=false", "--allow-metrics=false")
    command = [str(Path(sys.executable).with_name("headrace")), "serve", f"--model-repository={models}", *words]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until_it_answers()
        yield
    finally:
        server.terminate()
        server.wait()


@contextmanager
def replicas(models: Path, count: int) -> Iterator[Any]:
    """Run a Ray of one node with ``count`` replicas, and yield their handle."""
    import ray
    from ray import serve

    import headrace_ray

    ray.init("local", num_cpus=count + 1, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": HTTP_PORT})
        logging: Any = {"log_level": "ERROR", "enable_access_log": False}
        application = headrace_ray.deployment(models, num_replicas=count, logging_config=logging)
        handle = serve.run(application, route_prefix="/")
        wait_until_it_answers()
        yield handle
    finally:
        serve.shutdown()
        ray.shutdown()


def wait_until_it_answers() -> None:
    end = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(PATH, BODY.encode()), timeout=5).read()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def measure(script: Path, connections: int, seconds: int) -> Mapping[str, float]:
    """Return the figures of ``connections`` that send requests for ``seconds``."""
    wrk(script, connections, 2)
    before = cpu_s()
    text = wrk(script, connections, seconds)
    used = cpu_s() - before
    requests = float(found(r"(\d+) requests in", text))
    errors = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    return {
        "rate": float(found(r"Requests/sec: +([\d.]+)", text)),
        "cpu_ms": used / requests * 1e3,
        "p50": duration_ms(r"50% +([\d.]+)(\w+)", text),
        "p99": duration_ms(r"99% +([\d.]+)(\w+)", text),
        "errors": float(errors[1]) if errors else 0,
    }


def measure_handle(handle: Any, seconds: int) -> Mapping[str, float]:
    """Return the figures of calls by ``handle``, one after the other, from this process."""
    inputs = {"x": np.full((1, 16), 0.5, np.float32)}
    for _ in range(100):
        handle.infer.remote("identity", inputs).result()
    before, began, times = cpu_s(), time.perf_counter(), list[float]()
    while (started := time.perf_counter()) < began + seconds:
        handle.infer.remote("identity", inputs).result()
        times.append((time.perf_counter() - started) * 1e3)
    used, taken = cpu_s() - before, time.perf_counter() - began
    p50, p99 = np.percentile(times, (50, 99))
    figures = {"rate": len(times) / taken, "cpu_ms": used / len(times) * 1e3}
    return figures | {"p50": float(p50), "p99": float(p99), "errors": 0}


def wrk(script: Path, connections: int, seconds: int) -> str:
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}", "--latency", "-s", str(script), PATH]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def cpu_s() -> float:
    """Return the CPU time of this process and its children, except wrk, which has exited."""
    total = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"wrk says:\n{text}")
    return match[1]


def duration_ms(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    return float(match[1]) * _UNITS[match[2]] if match else float("nan")


def show(what: str, connections: int, figures: Mapping[str, float]) -> None:
    formats: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("rate", "{:,.0f}".format), ("cpu_ms", "{:.3f}".format), ("p50", "{:.2f}".format), ("p99", "{:.2f}".format),
        ("errors", "{:.0f}".format),
    )  # fmt: skip
    print(f"| {what} | {connections} |", " | ".join(write(figures[name]) for name, write in formats), "|", flush=True)


if __name__ == "__main__":
    main()
