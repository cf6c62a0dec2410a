"""Measure the cost of access keys per request: ``python benchmarks/access.py``.

CPU per request to an identity model on the event loop, over HTTP and gRPC, without sockets, as in `tracing`. The key
file has 10,000 principals with a key each. Each setting runs in its own process; settings alternate, and the minimum of
the rounds of 1,000 requests counts. With ``--bytecodes``, the bytecodes that Python executes per request.

With ``--sockets``, CPU per request of two whole servers, with and without keys, over HTTP (wrk) and gRPC (grpc_load.py)
at 1 and 16 connections. They alternate every second, and medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

from machine import free_ports
from tracing import _CONFIG, compare, measure

from headrace import Server, ServerOptions
from headrace.config.option_parts import Restriction
from headrace_access import AccessOptions
from headrace_access.key_file import new_key

KEYS = 10_000
SETTINGS = ("off", "off, with the header", "another interceptor", "keys", "keys, X-Api-Key", "certificates")


def write_keys(path: Path, count: int = KEYS) -> str:
    """Write a key file with ``count`` principals. Return the key of one."""
    principals: dict[str, Any] = {}
    key, taken = "", set[str]()
    for number in range(count):
        key, key_id, digest = new_key(taken)
        taken.add(key_id)
        allow = [{"models": ["numbers", f"own{number}*"], "operations": ["inference", "metadata"]}]
        principals[f"user{number}"] = {"keys": {key_id: {"sha256": digest}}, "allow": allow}
    path.write_text(json.dumps({"principals": principals, "certificates": {}}))
    return key


def run(setting: str, rounds: int, counts: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models/numbers/1").mkdir(parents=True)
        (Path(folder) / "models/numbers/config.pbtxt").write_text(_CONFIG)
        key = write_keys(Path(folder) / "access.json")
        restricted = {"model-repository": Restriction("key", "value")} if setting == "another interceptor" else {}
        is_checked = setting.startswith(("keys", "certificates"))
        groups: list[Any] = [AccessOptions(keys=f"{folder}/access.json")] if is_checked else []
        options = ServerOptions(
            model_repository=(f"{folder}/models",),
            plugin_options=groups,
            http_restricted_api=restricted,
            grpc_restricted_protocol=restricted,
        )
        header, shown = ("X-Api-Key", key) if setting.endswith("X-Api-Key") else ("Authorization", f"Bearer {key}")
        shown = "" if setting in ("off", "certificates") else shown
        subject = ((("commonName", "user0"),),)
        certificate = {"subject": subject} if setting == "certificates" else None
        with Server(options) as server:
            return server._call(measure, server, rounds, counts, shown, header, certificate)


# ---------------------------------------------------------------------- over sockets


@contextmanager
def serving(folder: Path, ports: Sequence[int], *flags: str) -> Iterator[int]:
    """Start a server. Yield its process id."""
    words = [f"--model-repository={folder}/models", f"--http-port={ports[0]}", f"--grpc-port={ports[1]}"]
    words += ["--allow-metrics=false", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", *flags]
    program = [sys.executable, "-m", "headrace_cli", "serve", *words]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/v2/health/ready", timeout=5):
                break
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def cpu_us(process: int) -> float:
    """Return the CPU time of the process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e6 / os.sysconf("SC_CLK_TCK")


def put(protocol: str, port: int, connections: int, authorization: str, seconds: float, script: Path) -> int:
    """Send load to a server for ``seconds``. Return the number of answered requests."""
    if protocol == "gRPC":
        words = [sys.executable, str(Path(__file__).with_name("grpc_load.py")), str(port), "numbers", "INPUT0"]
        words += [f"--connections={connections}", f"--seconds={seconds}", f"--authorization={authorization}"]
        return int(json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)["requests"])
    words = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(script)]
    words += ["-H", f"Authorization: {authorization}"] if authorization else []
    url = f"http://127.0.0.1:{port}/v2/models/numbers/infer"
    output = subprocess.run([*words, url], stdout=subprocess.PIPE, check=True, text=True).stdout
    if "Non-2xx" in output:
        raise SystemExit(output)
    found = re.search(r"(\d+) requests in", output)
    assert found is not None, output
    return int(found[1])


def over_sockets(turns: int, seconds: float, quotas: str = "") -> None:
    """Print the cost of keys per request; with the content of a file of ``quotas``, the additional cost of quotas."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "models/numbers/1").mkdir(parents=True)
        (folder / "models/numbers/config.pbtxt").write_text(_CONFIG)
        data = json.dumps([float(number) for number in range(16)])
        body = f'{{"inputs": [{{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": {data}}}]}}'
        script = folder / "post.lua"
        script.write_text(f"wrk.method = 'POST' wrk.body = '{body}' wrk.headers['Content-Type'] = 'application/json'")
        key = write_keys(folder / "access.json")
        ports = free_ports(4)
        (folder / "quotas.json").write_text(quotas)
        access, more = [f"--access-keys={folder}/access.json"], [f"--quota-file={folder}/quotas.json"] * bool(quotas)
        off = stack.enter_context(serving(folder, ports[:2], *access * bool(quotas)))
        keys = stack.enter_context(serving(folder, ports[2:], *access, *more))
        without = f"Bearer {key}" if quotas else ""
        servers = (("off", off, ports[:2], without), ("keys", keys, ports[2:], f"Bearer {key}"))
        for protocol, connections in product(("HTTP", "gRPC"), (1, 16)):
            found: dict[str, list[float]] = {"off": [], "keys": []}
            for turn in range(turns + 1):
                for title, process, (http, grpc), authorization in servers if turn % 2 else servers[::-1]:
                    before = cpu_us(process)
                    port = http if protocol == "HTTP" else grpc
                    count = put(protocol, port, connections, authorization, seconds, script)
                    if turn:  # the first one warms up
                        found[title].append((cpu_us(process) - before) / count)
            ratios = sorted(on / without for without, on in zip(found["off"], found["keys"], strict=True))
            names = ("keys", "quotas") if quotas else ("off", "keys")
            off_us, keys_us = (statistics.median(each) for each in found.values())
            spread = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"
            ratio, name = f"{statistics.median(ratios):.3f} ({spread})", f"{protocol} c{connections}"
            print(
                f"{name:<8} {names[0]} {off_us:6.1f} µs  {names[1]} {keys_us:6.1f} µs  ratio {ratio}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--bytecodes", action="store_true")
    parser.add_argument("--setting", choices=SETTINGS, help="this one only, as JSON")
    parser.add_argument("--sockets", action="store_true")
    parser.add_argument("--seconds", type=float, default=1)
    options = parser.parse_args()
    if options.sockets:
        over_sockets(options.turns, options.seconds)
        return
    if options.setting:
        print(json.dumps(run(options.setting, options.rounds, options.bytecodes)))
        return
    compare(__file__, SETTINGS, options)


if __name__ == "__main__":
    main()
