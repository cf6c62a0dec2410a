"""Memory under a mixture of everything: small and large, good and bad, HTTP and gRPC."""

from __future__ import annotations

import http.client
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import load
import machine
import servers
from report import Section, Target
from servers import Running
from settings import Settings, need_wrk

#: The share of the time in which caches and pools fill; not part of the slope.
WARM_UP = 0.2
SAMPLE_S = 2.0
#: A larger slope would show a leak within hours; a smaller one is within the noise of the allocator.
MIB_PER_MINUTE = 0.5
_INFER = "/v2/models/identity/infer"
#: Path, body and the status that refuses it: not JSON, a wrong type, a wrong shape, no such model.
BAD = (
    (_INFER, b'{"inputs":[', 500),
    (_INFER, b'{"inputs":[{"name":"INPUT0","datatype":"INT8","shape":[1,1],"data":[1]}]}', 400),
    (_INFER, b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1,1],"data":[1]}]}', 400),
    ("/v2/models/nobody/infer", b"{}", 404),
)


def mixed_load(settings: Settings) -> Section:
    """Resident memory over ``--soak-minutes`` of load, and its slope after warm-up."""
    need_wrk()
    section = Section("Mixed load", ("figure", "value"))
    with tempfile.TemporaryDirectory() as folder:
        repository = settings.repository(Path(folder), "identity", "tiny_add", "mlp")
        with servers.headrace(repository) as headrace:
            samples = _soak(headrace, settings.soak_minutes * 60)
            requests = {name: _requests(headrace, name) for name in ("identity", "tiny_add", "mlp")}
    warm = [(at, mib) for at, mib in samples if at >= samples[-1][0] * WARM_UP]
    slope = 60 * _slope(warm)
    section.rows += [
        ("length", f"{samples[-1][0] / 60:.1f} min"),
        ("requests answered", ", ".join(f"{name} {count:,}" for name, count in requests.items())),
        ("memory before, after warm-up, at the end", f"{samples[0][1]:.0f}, {warm[0][1]:.0f}, {warm[-1][1]:.0f} MiB"),
        ("slope after warm-up", f"{slope:+.3f} MiB/min"),
    ]
    wanted = f"<= {MIB_PER_MINUTE} MiB/min"
    section.targets.append(Target("mixed load: memory", wanted, f"{slope:+.3f}", slope <= MIB_PER_MINUTE))
    section.raw = {"samples": samples, "requests": requests}
    return section


def _soak(server: Running, seconds: float) -> list[tuple[float, float]]:
    """Return seconds since the start and MiB, while every kind of load runs in its own thread."""
    over = threading.Event()
    failures: list[BaseException] = []
    threads = [threading.Thread(target=_repeat, args=(put, server, over, failures)) for put in KINDS]
    for thread in threads:
        thread.start()
    started, samples = time.monotonic(), [(0.0, machine.rss_mib(server.pid))]
    try:
        while (left := seconds - (time.monotonic() - started)) > 0 and not failures:
            over.wait(min(SAMPLE_S, left))
            samples.append((time.monotonic() - started, machine.rss_mib(server.pid)))
            if len(samples) % 15 == 0:
                print(f"mixed load: {samples[-1][0]:5.0f} s  {samples[-1][1]:.1f} MiB", file=sys.stderr)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return samples


def _repeat(
    put: Callable[[Running], object], server: Running, over: threading.Event, failures: list[BaseException]
) -> None:
    try:
        while not over.is_set():
            put(server)
            over.wait(0.005)
    except Exception as error:
        failures.append(error)


def _json(server: Running) -> None:
    load.wrk(server, load.json_body("tiny_add", {"INPUT0": 16, "INPUT1": 16}), 8, 2)


def _binary(server: Running) -> None:
    load.wrk(server, load.binary_body("mlp", {"INPUT0": (1, 256)}), 4, 2)


def _large(server: Running) -> None:
    load.one_by_one(server, load.binary_body("identity", {"INPUT0": (1, 2**18)}), 0.1)
    load.one_by_one(server, load.binary_body("identity", {"INPUT0": (1, 2**22)}), 0.0)


def _grpc(server: Running) -> None:
    import numpy as np
    import tritonclient.grpc as grpc

    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        for size in range(1, 100):
            tensor = grpc.InferInput("INPUT0", [1, size], "FP32")
            tensor.set_data_from_numpy(np.zeros((1, size), np.float32))
            client.infer("identity", [tensor])


def _bad(server: Running) -> None:
    for path, body, wanted in BAD:
        with closing(http.client.HTTPConnection("127.0.0.1", server.http, timeout=10)) as connection:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            status = connection.getresponse().status
            if status != wanted:
                raise RuntimeError(f"{path} {body!r} was answered {status}")


def _leaving(server: Running) -> None:
    """A caller that disconnects within its request, and one that disconnects before the response."""
    body = load.binary_body("identity", {"INPUT0": (1, 1000)})
    head = "".join(f"{name}: {value}\r\n" for name, value in body.headers.items())
    request = f"POST {body.path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body.data)}\r\n\r\n".encode()
    for sent in (body.data[:100], body.data):
        with socket.create_connection(("127.0.0.1", server.http), timeout=10) as connection:
            connection.sendall(request + sent)


def _scrape(server: Running) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.metrics, timeout=10)) as connection:
        connection.request("GET", "/metrics")
        connection.getresponse().read()


KINDS = (_json, _binary, _large, _grpc, _bad, _leaving, _scrape)


def _requests(server: Running, model: str) -> int:
    success = load.statistics_of(server, model)["inference_stats"]["success"]  # type: ignore[index]
    return int(success["count"])


def _slope(samples: list[tuple[float, float]]) -> float:
    """Least squares, in MiB per second."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0
