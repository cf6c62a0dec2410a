"""Measure the cost and the effect of quotas: ``python benchmarks/quotas.py cost|sockets|flood|tenants``.

``sockets``: the same as ``cost`` for two whole servers, which alternate every second.

``cost``: CPU of the process per request, without sockets, over HTTP and gRPC: with access keys, and with quotas beside
them (limits of all kinds, and a shared model). Both alternate; the minimum of all rounds counts. ``--bytecodes`` prints
the bytecodes that Python executes instead, which do not depend on other programs.

``flood``: 99th percentile of a quiet tenant, alone and while another one sends from 64 connections.

``tenants``: memory and time per decision with more and more principals.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, perf_counter_ns, sleep
from typing import Any

import psutil
from access import over_sockets
from load import _find
from servers import Running, headrace
from tracing import measure

from headrace import Caller, Operation, Outcome, Server, ServerOptions
from headrace_access import AccessOptions
from headrace_quotas import QuotaOptions, Quotas

_FAST = """backend: "identity" max_batch_size: 64
input { name: "INPUT0" data_type: TYPE_FP32 dims: -1 } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: -1 }
parameters { key: "event_loop" value { string_value: "on" } }"""
_SLOW = """backend: "python" max_batch_size: 8 dynamic_batching {}
input { name: "INPUT0" data_type: TYPE_FP32 dims: -1 } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: -1 }
instance_group { count: COUNT }"""
_MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(SECONDS)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(
            each, "INPUT0").as_numpy())]) for each in requests]
"""
_LIMITS = {
    "requests_per_second": 1e9,
    "in_flight": 1_000_000,
    "input_bytes_per_second": 1e12,
    "output_tokens_per_minute": 1e12,
}
#: Quotas that count everything, and refuse nothing.
_ALL = {"defaults": {**_LIMITS, "models": {"*": _LIMITS}}, "sharing": {"*": {}}}
_USUAL = {"defaults": {"requests_per_second": 1e9, "in_flight": 1_000_000}, "sharing": {"*": {}}}
_BODY = {"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
_OUTCOME = Outcome(None, 0, 0)


def files(folder: Path, quotas: Any, config: str = _FAST, model: str = "") -> tuple[list[str], dict[str, str]]:
    """Write a repository, a key file and a quota file. Return the flags, and the keys of two principals."""
    (folder / "models/numbers/1").mkdir(parents=True)
    (folder / "models/numbers/config.pbtxt").write_text(config)
    if model:
        (folder / "models/numbers/1/model.py").write_text(model)
    keys = {}
    for name in ("quiet", "flood"):
        words = [sys.executable, "-m", "headrace_cli", "keys", "add", str(folder / "access.json"), name]
        keys[name] = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    (folder / "quotas.json").write_text(json.dumps(quotas))
    return [f"--access-keys={folder}/access.json", f"--quota-file={folder}/quotas.json"], keys


def cost(options: argparse.Namespace) -> None:
    if options.setting:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _, keys = files(folder, _ALL if options.setting == "all" else _USUAL)
            groups: list[Any] = [AccessOptions(keys=f"{folder}/access.json")]
            groups += [QuotaOptions(file=f"{folder}/quotas.json")] * (options.setting != "access")
            settings = ServerOptions(model_repository=(f"{folder}/models",), plugin_options=groups)
            with Server(settings) as server:
                rounds = 1 if options.bytecodes else 15
                print(json.dumps(server._call(measure, server, rounds, options.bytecodes, f"Bearer {keys['quiet']}")))
        return
    least: dict[str, dict[str, float]] = {"access": {}, "quotas": {}, "all": {}}
    for _ in range(1 if options.bytecodes else options.turns):
        for setting, found in least.items():
            words = [sys.executable, __file__, "cost", f"--setting={setting}"] + ["--bytecodes"] * options.bytecodes
            output = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
            for title, each in json.loads(output).items():
                found[title] = min(found.get(title, each), each)
    unit = "bytecodes" if options.bytecodes else "µs"
    for title, before in least["access"].items():
        ratios = [f"{least[name][title]:.2f}: {least[name][title] / before:.3f}" for name in ("quotas", "all")]
        print(f"{title}: access {before:.2f} {unit}, with quotas {ratios[0]}, with quotas of all kinds {ratios[1]}")


def sockets(options: argparse.Namespace) -> None:
    over_sockets(options.turns, 1, json.dumps(_USUAL))


# ---------------------------------------------------------------------- a tenant that floods


def flood(options: argparse.Namespace) -> None:
    """Print the latencies of the quiet tenant, for each kind of quota of the other one."""
    model = _MODEL.replace("SECONDS", str(options.ms / 1000))
    kinds: dict[str, Any] = {
        "no quotas": None,
        "shared model": {"sharing": {"*": {}}},
        "shared model, 200/s": {"principals": {"flood": {"requests_per_second": 200}}, "sharing": {"*": {}}},
        "200/s": {"principals": {"flood": {"requests_per_second": 200}}},
        "4 in flight": {"principals": {"flood": {"in_flight": 4}}, "sharing": {"*": {}}},
    }
    for title, quotas in kinds.items():
        if options.only not in title:
            continue
        with tempfile.TemporaryDirectory() as name:
            flags, keys = files(Path(name), quotas or {}, _SLOW.replace("COUNT", str(options.count)), model)
            with headrace(Path(name) / "models", *flags[: 1 + (quotas is not None)]) as server:
                _latencies(server, keys["quiet"], 1)
                alone, during, sent = [], [], []
                for _ in range(options.turns):
                    alone += _latencies(server, keys["quiet"], options.seconds)
                    with _flooding(server, keys["flood"], options.connections, Path(name)) as answered:
                        sleep(1)
                        during += _latencies(server, keys["quiet"], options.seconds)
                    sent.append(answered[0])
        p99s = [quantiles(each, n=100)[98] for each in (alone, during)]
        p50s = [median(each) for each in (alone, during)]
        print(
            f"{title}: quiet alone p50 {p50s[0]:.2f} ms p99 {p99s[0]:.2f}, during p50 {p50s[1]:.2f} p99 {p99s[1]:.2f}: "
            f"{p99s[1] / p99s[0]:.2f} ({len(during)} requests); the other: {median(sent):.0f} answers per second",
            flush=True,
        )


def _latencies(server: Running, key: str, seconds: float) -> list[float]:
    """Return the milliseconds of requests, one after the other."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http)
    found, body, headers = [], json.dumps(_BODY), {"Authorization": f"Bearer {key}"}
    ends = perf_counter() + seconds
    while (began := perf_counter()) < ends:
        connection.request("POST", "/v2/models/numbers/infer", body, headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 200, response.status
        found.append((perf_counter() - began) * 1000)
        sleep(0.002)
    connection.close()
    return found


@contextmanager
def _flooding(server: Running, key: str, connections: int, folder: Path) -> Iterator[list[float]]:
    script = folder / "post.lua"
    script.write_text(
        f'wrk.method="POST"\nwrk.headers["Authorization"]="Bearer {key}"\n'
        f'wrk.headers["Content-Type"]="application/json"\nwrk.body=[==[{json.dumps(_BODY)}]==]\n'
    )
    url = f"http://127.0.0.1:{server.http}/v2/models/numbers/infer"
    words = ["wrk", "-t1", f"-c{connections}", "-d600s", "-s", str(script), url]
    answered = [0.0]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield answered
        finally:
            process.send_signal(2)
            text = process.communicate()[0]
            answered[0] = float(_find(r"Requests/sec:\s+([\d.]+)", text))


# ---------------------------------------------------------------------- many tenants


def tenants(options: argparse.Namespace) -> None:
    """Print the memory of each principal, and the time of an admission, for 10 to 100,000 principals."""
    asyncio.run(_tenants())


async def _tenants() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "quotas.json"
        path.write_text(json.dumps(_ALL | {"principals": {f"team-{n}-*": {"weight": 2} for n in range(100)}}))
        made = Quotas(ServerOptions(plugin_options=[QuotaOptions(file=str(path))]))
        before, known = psutil.Process().memory_info().rss, 0
        for number in (10, 100, 1_000, 10_000, 100_000):
            for each in range(known, number):
                _ask(made, f"principal-{each}")
            grown, known = psutil.Process().memory_info().rss - before, number
            times = []
            for turn in range(20_000):
                caller = Caller("http", "127.0.0.1", principal=f"principal-{turn * 7919 % number}")
                began = perf_counter_ns()
                watch = made.admit(caller, Operation.INFER, "digits")
                watch.ended(_OUTCOME)  # type: ignore[union-attr]
                times.append(perf_counter_ns() - began)
            print(f"{number} principals: {grown / number:.0f} bytes each, {median(times):.0f} ns for one decision")


def _ask(made: Quotas, principal: str) -> None:
    watch: Any = made.admit(Caller("http", "127.0.0.1", principal=principal), Operation.INFER, "digits")
    watch.ended(_OUTCOME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "sockets", "flood", "tenants"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--bytecodes", action="store_true")
    parser.add_argument("--setting", default="", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="for flood: quotas with this in their title")
    parser.add_argument("--ms", type=float, default=5, help="for flood: the time of an execution")
    parser.add_argument("--count", type=int, default=1, help="for flood: instances")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5)
    options = parser.parse_args()
    {"cost": cost, "sockets": sockets, "flood": flood, "tenants": tenants}[options.what](options)


if __name__ == "__main__":
    main()
