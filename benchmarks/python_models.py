"""Python models, in processes and in threads, compared with the real Triton."""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from functools import partial
from pathlib import Path

import load
import machine
import psutil
import servers
from measure import Case, Run, as_json, compare, median
from report import LOAD_COLUMNS, Section, Target, load_row
from servers import Running
from settings import Settings, need_wrk

FLOATS = 16
MIB = 2**20
STRINGS = 1_000_000
CALLS = 1_000
CYCLES, REQUESTS = 50, 100_000

THREADS = "--backend-config=python,isolation=thread"
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")

_IO = 'input {{ name: "INPUT0" data_type: {0} dims: [-1] }} output {{ name: "OUTPUT0" data_type: {0} dims: [-1] }}\n'
_ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each.as_numpy())]) for each in inputs]
"""
_CALLER = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        calls = int(tensor.as_numpy()[0])
        began = time.perf_counter()
        for _ in range(calls):
            response = pb_utils.InferenceRequest(
                model_name="identity", requested_output_names=["OUTPUT0"], inputs=[tensor]
            ).exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
        took = np.array([time.perf_counter() - began], np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", took)])
"""


_GATHERER = """
import asyncio
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        calls = int(tensor.as_numpy()[0])
        began = time.perf_counter()
        inner = [
            pb_utils.InferenceRequest(model_name="identity", requested_output_names=["OUTPUT0"], inputs=[tensor])
            for _ in range(calls)
        ]
        for response in await asyncio.gather(*[each.async_exec() for each in inner]):
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
        took = np.array([time.perf_counter() - began], np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", took)])
"""


def small(settings: Settings) -> Section:
    """`pyident`, 16 floats, HTTP and gRPC, 1, 4 and 16 connections."""
    need_wrk()
    analyzer = settings.yardstick("perf_analyzer")
    section = Section("pyident, 16 floats: processes, threads and Triton", LOAD_COLUMNS)
    body = load.json_body("pyident", {"INPUT0": FLOATS})
    loads = {
        f"{protocol}, {connections} connections": partial(_perf_analyzer, analyzer, protocol, connections)
        for protocol in ("http", "grpc")
        for connections in (1, 4, 16)
    } | {"http JSON from wrk, 16 connections": lambda server, seconds: load.wrk(server, body, 16, seconds)}
    with tempfile.TemporaryDirectory() as folder:
        repository = settings.repository(Path(folder), "pyident")
        with (
            servers.headrace(repository, name="processes") as processes,
            servers.headrace(repository, THREADS, name="threads") as threads,
            servers.triton(settings.yardsticks, repository) as triton,
        ):
            for name, put in loads.items():
                found = compare(
                    Case(name, lambda server: "pyident", put),
                    [processes, threads, triton],
                    settings.runs,
                    settings.seconds,
                )
                section.rows += [load_row(name, server, runs) for server, runs in found.items()]
                section.raw[name] = as_json(found)
                section.targets += _beside_triton(name, found)
    return section


def large(settings: Settings) -> Section:
    """1 MiB and 16 MiB over HTTP, one connection, in MiB per second each way."""
    section = Section(
        "pyident, large tensors, 1 connection: processes and Triton",
        ("case", "server", "MiB/s each way", "p50 ms", "server CPU ms/request"),
    )
    with tempfile.TemporaryDirectory() as folder:
        repository = settings.repository(Path(folder), "pyident")
        with (
            servers.headrace(repository, name="processes") as processes,
            servers.triton(settings.yardsticks, repository) as triton,
        ):
            for mib in (1, 16):
                body = load.binary_body("pyident", {"INPUT0": (1, mib * MIB // 4)})
                case = Case(f"{mib} MiB", lambda server: "pyident", partial(_one_by_one, body))
                found = compare(case, [processes, triton], settings.runs, settings.seconds)
                section.raw[case.name] = as_json(found)
                for server, runs in found.items():
                    rate, p50, cpu = (median(runs, field) for field in ("rps", "p50_us", "server_us"))
                    section.rows.append(
                        (case.name, server, f"{rate * mib:,.0f}", f"{p50 / 1000:.1f}", f"{cpu / 1000:.1f}")
                    )
                ratio = _ratio(found, "processes", "rps")
                section.targets.append(
                    Target(f"{case.name}: MiB/s, ratio to Triton", ">= 1", f"{ratio:.2f}", ratio >= 1)
                )
    return section


def strings(settings: Settings) -> Section:
    """A BYTES tensor of a million short strings through a model that returns it."""
    section = Section("1,000,000 strings there and back", ("host", "server CPU ms, all processes", "wall ms"))
    texts = [str(number).encode() for number in range(STRINGS)]
    data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    document = {
        "inputs": [
            {
                "name": "INPUT0",
                "datatype": "BYTES",
                "shape": [STRINGS],
                "parameters": {"binary_data_size": len(data)},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    header = json.dumps(document).encode()
    body = load.Body("echo", header + data, len(header))
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), "echo", _ECHO, _IO.format("TYPE_STRING"))
        for host, flags in {"processes": (), "threads": (THREADS,)}.items():
            with servers.headrace(Path(folder), *flags) as running:
                found = compare(
                    Case(f"strings, {host}", lambda server: "echo", partial(_one_by_one, body)),
                    [running],
                    settings.runs,
                    settings.seconds,
                )["headrace"]
            cpu_ms = median(found, "server_us") / 1000
            section.rows.append((host, f"{cpu_ms:,.0f}", f"{median(found, 'p50_us') / 1000:,.0f}"))
            section.targets.append(
                Target(f"1,000,000 strings, {host}: CPU", "< 300 ms", f"{cpu_ms:,.0f} ms", cpu_ms < 300)
            )
    return section


def calls(settings: Settings) -> Section:
    """The cost of each of 1,000 calls from one execute to an identity model: one by one, and together."""
    section = Section("1,000 BLS calls from one execute", ("calls", "host", "µs per call (min..max)"))
    config = _IO.format("TYPE_FP32")
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), "caller", _CALLER, config)
        _write(Path(folder), "gatherer", _GATHERER, config)
        (Path(folder) / "identity/1").mkdir(parents=True)
        (Path(folder) / "identity/config.pbtxt").write_text('backend: "identity"\n' + config)
        for host, flags in {"processes": (), "threads": (THREADS,)}.items():
            with servers.headrace(Path(folder), *flags) as running:
                found = {
                    title: sorted(_seconds_of_calls(running, model) / CALLS * 1e6 for _ in range(settings.runs + 1))
                    for model, title in {"caller": "exec, one by one", "gatherer": "async_exec, together"}.items()
                }
            for title, took in found.items():
                middle = took[len(took) // 2]
                section.rows.append((title, host, f"{middle:.0f} ({took[0]:.0f}..{took[-1]:.0f})"))
                name = f"BLS, {host}, {title}: a call"
                section.targets.append(Target(name, "< 100 µs", f"{middle:.0f} µs", middle < 100))
    return section


def cycles(settings: Settings) -> Section:
    """Memory, descriptors and files in /dev/shm over loads, unloads and requests."""
    section = Section(
        f"{CYCLES} loads and unloads, {REQUESTS:,} requests",
        ("after", "RSS of the server MiB", "descriptors", "processes", "entries of /dev/shm added"),
    )
    body = load.json_body("pyident", {"INPUT0": FLOATS})
    shared_before = set(Path("/dev/shm").iterdir())
    added: set[Path] = set()

    def measure(after: str, running: Running) -> tuple[float, int]:
        added.update(set(Path("/dev/shm").iterdir()) - shared_before)
        process = psutil.Process(running.pid)
        rss, fds = process.memory_info().rss / MIB, process.num_fds()
        section.rows.append((after, f"{rss:.1f}", str(fds), str(len(machine.tree(running.pid))), str(len(added))))
        return rss, fds

    with tempfile.TemporaryDirectory() as folder:
        repository = settings.repository(Path(folder), "pyident")
        with servers.headrace(repository, *EXPLICIT) as running:
            load.wrk(running, body, 16, 2)
            _reload(running, 3)
            first = measure("warm-up", running)
            count = 0
            for part in range(5):
                _reload(running, CYCLES // 5)
                while count < REQUESTS * (part + 1) // 5:
                    count += load.wrk(running, body, 16, 1).requests
                last = measure(f"{CYCLES // 5 * (part + 1)} cycles, {count:,} requests", running)
    grown, opened = last[0] - first[0], last[1] - first[1]
    section.targets += [
        Target("cycles: RSS added", "< 5 MiB", f"{grown:.1f} MiB", grown < 5),
        Target("cycles: descriptors added", "0", str(opened), opened <= 0),
        Target("cycles: /dev/shm", "empty", f"{len(added)} entries", not added),
    ]
    return section


def _perf_analyzer(program: Path, protocol: str, connections: int, server: Running, seconds: float) -> load.Seen:
    words, varied = ("--shape", f"INPUT0:{FLOATS}"), {"INPUT0": (FLOATS,)}
    return load.perf_analyzer(program, server, protocol, "pyident", connections, seconds, *words, varied=varied)


def _one_by_one(body: load.Body, server: Running, seconds: float) -> load.Seen:
    return load.one_by_one(server, body, seconds)


def _ratio(found: dict[str, list[Run]], server: str, field: str) -> float:
    return median(found[server], field) / median(found["triton"], field)


def _beside_triton(name: str, found: dict[str, list[Run]]) -> list[Target]:
    """Targets are for HTTP; gRPC is reported."""
    is_http, targets = name.startswith("http"), []
    if "16 " in name:
        for server, wanted in {"processes": 1.3, "threads": 2.0}.items():
            ratio = _ratio(found, server, "rps")
            is_met = ratio >= wanted or not is_http
            shown = f">= {wanted}" if is_http else "reported"
            targets.append(Target(f"{name}: rate, {server} to Triton", shown, f"{ratio:.2f}", is_met))
    fields = {"server_us": "server CPU"} | ({"p50_us": "p50"} if " 1 " in name else {})
    for field, title in fields.items():
        ratio = _ratio(found, "processes", field)
        shown = "<= 1" if is_http else "reported"
        targets.append(
            Target(f"{name}: {title}, processes to Triton", shown, f"{ratio:.2f}", ratio <= 1 or not is_http)
        )
    return targets


def _write(repository: Path, name: str, source: str, config: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.py").write_text(source)
    (repository / name / "config.pbtxt").write_text('backend: "python"\n' + config)


def _seconds_of_calls(running: Running, model: str) -> float:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [CALLS]}
    answer = _post(running, f"/v2/models/{model}/infer", {"inputs": [tensor]})
    return float(answer["outputs"][0]["data"][0])  # type: ignore[index]


def _reload(running: Running, times: int) -> None:
    for _ in range(times):
        _post(running, "/v2/repository/models/pyident/unload", {})
        _post(running, "/v2/repository/models/pyident/load", {})
    while not _is_ready(running):
        time.sleep(0.01)


def _is_ready(running: Running) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{running.http}/v2/models/pyident/ready", timeout=10):
            return True
    except OSError:
        return False


def _post(running: Running, path: str, document: object) -> dict[str, object]:
    request = urllib.request.Request(f"http://127.0.0.1:{running.http}{path}", json.dumps(document).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return dict(json.loads(text)) if text else {}
