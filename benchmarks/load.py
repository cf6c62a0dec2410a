"""Load generators. Each call sends load to one server for some seconds and returns the figures."""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from servers import Running

#: The most bytes of a response's head.
HEAD_BYTES = 4096
#: The script of wrk whose requests all differ.
VARIED = Path(__file__).resolve().parent / "varied.lua"
#: The script of wrk for requests of sequences, by its argument.
SEQUENCES = VARIED.with_name("sequences.lua")
GRPC_LOAD = VARIED.with_name("grpc_load.py")
#: The sets of values for perf_analyzer, fewer if all together would have more floats than this limit.
_STEPS, _STEPS_FLOATS = 256, 1 << 20
UNITS_US = {"us": 1.0, "ms": 1e3, "s": 1e6, "m": 6e7}


class LoadFailed(RuntimeError):
    """A load generator has no result: it failed, the figures were unstable, or a request failed."""


@dataclass(frozen=True, slots=True)
class Body:
    """An HTTP inference request; ``header_size`` is 0 for a JSON body."""

    model: str
    data: bytes
    header_size: int = 0

    @property
    def headers(self) -> dict[str, str]:
        if not self.header_size:
            return {"Content-Type": "application/json"}
        return {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(self.header_size),
        }

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}/infer"


@dataclass(frozen=True, slots=True)
class Seen:
    """The report of a load generator; ``client_s`` is its own CPU time."""

    rps: float
    p50_us: float
    p99_us: float
    client_s: float
    requests: int = 0


def json_body(model: str, inputs: dict[str, int]) -> Body:
    """FP32 inputs, name to length, as JSON numbers."""
    tensors = [
        {"name": name, "datatype": "FP32", "shape": [1, size], "data": [1.5 + i for i in range(size)]}
        for name, size in inputs.items()
    ]
    return Body(model, json.dumps({"inputs": tensors}, separators=(",", ":")).encode())


def binary_body(model: str, inputs: dict[str, tuple[int, ...]]) -> Body:
    """FP32 inputs of zeros, name to shape, in the binary extension, with binary outputs."""
    sizes = {name: 4 * _product(shape) for name, shape in inputs.items()}
    tensors = [
        {"name": name, "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": sizes[name]}}
        for name, shape in inputs.items()
    ]
    document = {"inputs": tensors, "parameters": {"binary_data_output": True}}
    header = json.dumps(document, separators=(",", ":")).encode()
    return Body(model, header + bytes(sum(sizes.values())), len(header))


def wrk(
    server: Running,
    body: Body,
    connections: int,
    seconds: float,
    script: Path | None = None,
    threads: int = 1,
    arguments: Sequence[str] = (),
) -> Seen:
    """Send requests over HTTP for ``seconds``: all with ``body``, or from ``script`` with its ``arguments``.

    Raises `LoadFailed` if the status of a response is not 200.
    """
    with tempfile.TemporaryDirectory() as folder:
        if script is None:
            script = Path(folder) / "post.lua"
            payload = Path(folder) / "body"
            payload.write_bytes(body.data)
            headers = "\n".join(f'wrk.headers["{name}"]="{value}"' for name, value in body.headers.items())
            script.write_text(f'wrk.method="POST"\n{headers}\nwrk.body=io.open("{payload}","rb"):read("*a")\n')
        url = f"http://127.0.0.1:{server.http}{body.path}"
        command = [
            "wrk",
            f"-t{threads}",
            f"-c{connections}",
            f"-d{max(1, round(seconds))}s",
            "--latency",
            "-s",
            str(script),
            url,
            "--",
            *arguments,
        ]
        text, client_s = _run(command)
    if failed := re.search(r"(Non-2xx.*|Socket errors.*)", text):
        raise LoadFailed(f"{server.name} {body.path}: {failed[1]}")
    return Seen(
        float(_find(r"Requests/sec:\s+([\d.]+)", text)),
        _us(_find(r"(?m)^\s+50%\s+(\S+)", text)),
        _us(_find(r"(?m)^\s+99%\s+(\S+)", text)),
        client_s,
        int(_find(r"(\d+) requests in", text)),
    )


def perf_analyzer(
    program: Path,
    server: Running,
    protocol: str,
    model: str,
    connections: int,
    seconds: float,
    *extra: str,
    varied: Mapping[str, Sequence[int]] | None = None,
) -> Seen:
    """Measure three windows of ``seconds / 3``, which may differ by any amount.

    The values of the inputs in ``varied``, name to shape, change from request to request; the others are chosen once.
    perf_analyzer cannot set ids or headers, except for the ids of sequences. Raises `LoadFailed` if perf_analyzer finds
    the windows unstable nevertheless, as on a busy machine.
    """
    port = server.grpc if protocol == "grpc" else server.http
    with tempfile.NamedTemporaryFile(suffix=".csv") as table, tempfile.NamedTemporaryFile("w", suffix=".json") as data:
        if varied:
            json.dump({"data": _steps(varied)}, data)
            data.flush()
            extra = (*extra, "--input-data", data.name)
        command = [str(program), "-m", model, "-u", f"127.0.0.1:{port}", "-i", protocol]
        command += ["--concurrency-range", str(connections), "--measurement-interval", str(round(seconds * 1000 / 3))]
        command += ["-s", "999", "-r", "3", "-f", table.name, *extra]
        text, client_s = _run(command)
        rows = list(csv.DictReader(Path(table.name).read_text().splitlines()))
    if not rows:
        raise LoadFailed(f"perf_analyzer on {server.name} {model}: {text[-1500:]}")
    row = rows[0]
    return Seen(float(row["Inferences/Second"]), float(row["p50 latency"]), float(row["p99 latency"]), client_s)


def _steps(varied: Mapping[str, Sequence[int]]) -> list[dict[str, object]]:
    """Return the number of sets: enough for all requests in flight to differ, fewer for large inputs."""
    sizes = {name: _product(shape) for name, shape in varied.items()}
    steps: list[dict[str, object]] = []
    for number in range(max(4, min(_STEPS, _STEPS_FLOATS // sum(sizes.values())))):
        step: dict[str, object] = {}
        for name, shape in varied.items():
            raw = array("f", [number + 0.25]) * sizes[name]
            step[name] = {"b64": base64.b64encode(raw.tobytes()).decode(), "shape": list(shape)}
        steps.append(step)
    return steps


def grpc(server: Running, model: str, inputs: str, connections: int, seconds: float, constant: bool = False) -> Seen:
    """Send requests that all differ, or one repeatedly. Raises `LoadFailed` if a request was not answered."""
    command = [sys.executable, str(GRPC_LOAD), str(server.grpc), model, inputs]
    command += [f"--connections={connections}", f"--seconds={seconds}", *(["--constant"] if constant else [])]
    text, client_s = _run(command)
    found = json.loads(text)
    return Seen(found["rps"], found["p50_us"], found["p99_us"], client_s, found["requests"])


def one_by_one(server: Running, body: Body, seconds: float) -> Seen:
    """Use one connection, for large bodies: the response is read and discarded."""
    before = os.times()
    times_s: list[float] = []
    head = "".join(f"{name}: {value}\r\n" for name, value in body.headers.items())
    request = f"POST {body.path} HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {len(body.data)}\r\n\r\n".encode()
    buffer = memoryview(bytearray(1 << 20))
    with socket.create_connection(("127.0.0.1", server.http), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        started = time.monotonic()
        while time.monotonic() - started < seconds or len(times_s) < 3:
            at = time.monotonic()
            connection.sendall(request)
            connection.sendall(body.data)
            _read_answer(connection, buffer)
            times_s.append(time.monotonic() - at)
    used = os.times()
    client_s = used.user + used.system - before.user - before.system
    p99 = sorted(times_s)[int(len(times_s) * 0.99)]
    median = statistics.median(times_s)
    return Seen(len(times_s) / sum(times_s), median * 1e6, p99 * 1e6, client_s, len(times_s))


def statistics_of(server: Running, model: str) -> dict[str, object]:
    """Return ``/v2/models/MODEL/stats`` of the only version."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/models/{model}/stats", timeout=10) as answer:
        document: dict[str, object] = json.load(answer)["model_stats"][0]
    return document


@dataclass(frozen=True, slots=True)
class Counted:
    """Return the requests that a model answered, its rows, and its executions, of all processes of a server."""

    successes: int
    rows: int
    executions: int


def counted_by(server: Running, model: str) -> Counted:
    """Return the text of the metrics page."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=10) as answer:
        page = answer.read().decode()

    def count(series: str) -> int:
        found = re.findall(rf'^nv_inference_{series}{{.*model="{model}".*}} (\S+)$', page, re.MULTILINE)
        return int(sum(map(float, found)))

    return Counted(count("request_success"), count("count"), count("exec_count"))


def _read_answer(connection: socket.socket, buffer: memoryview) -> None:
    head, got = b"", 0
    while b"\r\n\r\n" not in head:
        received = connection.recv_into(buffer[got:])
        if not received:
            raise RuntimeError(f"the server ended its answer at {head!r}")
        got += received
        head = bytes(buffer[: min(got, HEAD_BYTES)])
    text = head.partition(b"\r\n\r\n")[0].decode("latin-1")
    if " 200" not in text.split("\r\n", 1)[0]:
        raise RuntimeError(head.decode("latin-1"))
    remaining = int(_find(r"(?im)^content-length: (\d+)", text)) - (got - len(text) - 4)
    while remaining > 0:
        received = connection.recv_into(buffer)
        if not received:
            raise RuntimeError("the server closed the connection")
        remaining -= received


def _run(command: list[str]) -> tuple[str, float]:
    """Return the output and the CPU seconds of a command. Raises `LoadFailed` with the output if it fails."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    with process.stdout:
        text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise LoadFailed(f"{' '.join(command)}: {text[-1500:]}")
    return text, usage.ru_utime + usage.ru_stime


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise LoadFailed(f"no {pattern!r} in: {text[-1500:]}")
    return found[1]


def _us(text: str) -> float:
    number, unit = re.match(r"([\d.]+)(\w+)", text).groups()  # type: ignore[union-attr]
    return float(number) * UNITS_US[unit]


def _product(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
