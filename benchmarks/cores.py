"""What frontend processes win here, and what they would on more cores: ``python benchmarks/cores.py``.

``wrk`` puts the same load on a server with each number of frontend processes, in turns; no two requests are alike.
Medians of the turns: the rate, and the CPU that a request takes in the process with the models, in the frontend
processes together, and in ``wrk``. The rates to be had on more cores follow from them. With ``--beside``, the
``headrace`` of another environment is asked as well. Needs ``wrk``.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
from load import VARIED
from servers import Running, program
from settings import need_wrk

_CONFIG = """backend: "identity" max_batch_size: 64 dynamic_batching { }
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
"""
CORES = (4, 8, 16, 64)


class Turn(NamedTuple):
    """``engine_us``, ``frontends_us`` and ``client_us`` are of CPU, per request."""

    rate: float
    engine_us: float
    frontends_us: float
    client_us: float


def cpu_s(server: Running) -> tuple[float, float]:
    """Of the server's first process, and of the frontend processes that it has started."""

    def of(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    first = psutil.Process(server.pid)
    frontends = [each for each in first.children() if any("frontend process" in word for word in each.cmdline())]
    return of(first), sum(map(of, frontends))


def put(server: Running, connections: int, seconds: int, kind: str) -> Turn:
    """One turn of load of ``kind``."""
    url = f"http://127.0.0.1:{server.http}/v2/models/identity/infer"
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(VARIED), url, "--", kind]
    engine_s, frontends_s = cpu_s(server)
    client = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    engine, frontends = cpu_s(server)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "Non-2xx" in said or "Socket errors" in said:
        raise SystemExit(said)
    requests = int(re.findall(r"(\d+) requests in", said)[0])
    client_s = ended.ru_utime + ended.ru_stime - client.ru_utime - client.ru_stime
    spent = (engine - engine_s, frontends - frontends_s, client_s)
    return Turn(float(re.findall(r"Requests/sec:\s+([\d.]+)", said)[0]), *(each * 1e6 / requests for each in spent))


def middle(turns: Sequence[Turn]) -> Turn:
    return Turn(*map(median, zip(*turns, strict=True)))


def show(found: dict[tuple[str, str, int], list[Turn]]) -> None:
    print(f"{'load':24}{'server':22}{'rate':>9}{'engine µs':>11}{'frontends µs':>14}{'wrk µs':>8}")
    for (kind, name, connections), turns in found.items():
        rate, engine_us, frontends_us, client_us = middle(turns)
        row = (
            f"{kind + f' c{connections}':24}{name:22}{rate:9,.0f}{engine_us:11.1f}{frontends_us:14.1f}{client_us:8.1f}"
        )
        if frontends_us:
            bounds = [
                f"{cores}: {min(1e6 / engine_us, (cores - 1) * 1e6 / frontends_us):,.0f}"
                for cores in CORES
            ]  # fmt: skip
            row += "   at most on so many cores, one of them the engine's: " + ", ".join(bounds)
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--connections", type=int, nargs="+", default=[64])
    parser.add_argument("--kinds", nargs="+", default=["json", "binary"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--beside", type=Path, metavar="HEADRACE")
    arguments = parser.parse_args()
    need_wrk()
    here = Path(sys.executable).with_name("headrace")
    found: dict[tuple[str, str, int], list[Turn]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (Path(folder) / "identity" / "1").mkdir(parents=True)
        (Path(folder) / "identity" / "config.pbtxt").write_text(_CONFIG)
        running: list[Running] = []
        for label, path in (("", here), ("beside, ", arguments.beside)):
            for count in arguments.processes if path else ():
                name = f"{label}{count or 'no'} processes"
                flags = [f"--frontend-processes={count}"]
                running.append(stack.enter_context(program(name, path, Path(folder), *flags)))
        for server in running:
            put(server, 64, 1, "json")
        for _ in range(arguments.runs):
            for kind in arguments.kinds:
                for connections in arguments.connections:
                    for server in running:
                        turn = put(server, connections, arguments.seconds, kind)
                        found.setdefault((kind, server.name, connections), []).append(turn)
    print(f"{os.cpu_count()} cores")
    show(found)


if __name__ == "__main__":
    main()
