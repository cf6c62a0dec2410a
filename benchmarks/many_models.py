"""Measure the cost of many models: the start of a server, and a poll of a repository without changes.

    python benchmarks/many_models.py [--loaded 200] [--network digits] [--polled 2000] [--rounds 5]

- **load**: a server of ONNX models (a network of networks.py, one instance and one thread each), from its start until
  it is ready, minus the time of a server of one model. For comparison, a process that creates as many sessions in as
  many threads, minus its time for one. Both alternate; the minimum of the rounds counts.
- **poll**: the CPU of one poll of a server in control mode ``poll``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import machine
import servers
from frameworks import OnnxRuntime
from networks import NETWORKS

from headrace import ServerOptions
from headrace.models.control import read_fingerprints
from headrace.plugins import Plugins
from headrace.storage.repositories import Repositories

#: The default of ``--model-load-thread-count``.
THREADS = ServerOptions().model_load_thread_count
#: The targets: the time of a load over that of its sessions, and the CPU of a poll in s.
WANTED_RATIO, WANTED_POLL_S = 1.2, 0.5


@dataclass(frozen=True, slots=True)
class Cost:
    """Wall time and CPU in s."""

    wall_s: float
    cpu_s: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


def write(folder: Path, count: int, network: str = "digits") -> Path:
    """Write a repository of ``count`` models with complete configs and one common file to ``folder``. Return it."""
    engine = OnnxRuntime()
    for number in range(count):
        version = folder / f"{network}_{number}" / "1"
        version.mkdir(parents=True)
        if number:
            (version / "model.onnx").hardlink_to(folder / f"{network}_0" / "1" / "model.onnx")
        else:
            engine.write(network, version)
        (version.parent / "config.pbtxt").write_text(engine.config_of(network, 1, engine.threads_of(1, 1)))
    return folder


def of_a_server(repository: Path) -> Cost:
    """Return the time and the CPU from the start until the server is ready."""
    with servers.headrace(repository, "--plugins=onnxruntime", "--log-info=false") as server:
        return Cost(server.start_s, machine.read(server.pid).tree_s)


def of_sessions(repository: Path, threads: int) -> Cost:
    """Return the time and the CPU of a process that creates a session of every model on ``threads`` threads."""
    command = [sys.executable, __file__, "--sessions", str(repository), str(threads)]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        cost = Cost(time.monotonic() - started, machine.read(process.pid).tree_s)
        process.communicate()
    return cost


def make_sessions(repository: Path, threads: int) -> None:
    engine = OnnxRuntime()
    versions = sorted(repository.glob("*/1"))
    with ThreadPoolExecutor(threads) as pool:
        sessions = list(pool.map(lambda version: engine.open(version, 1), versions))
    print(len(sessions), flush=True)
    sys.stdin.read()


def poll_s(repository: Path, polls: int) -> float:
    """Return the minimum CPU of one poll in s."""
    options = ServerOptions(model_repository=(str(repository),), model_control_mode="poll")
    repositories = Repositories(options, Plugins.discover(()).storages)
    found = []
    before = read_fingerprints(repositories)
    for _ in range(polls):
        started = time.process_time()
        after = read_fingerprints(repositories)
        assert after == before
        found.append(time.process_time() - started)
    return min(found)


def least(costs: list[Cost]) -> Cost:
    return Cost(min(cost.wall_s for cost in costs), min(cost.cpu_s for cost in costs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loaded", type=int, default=200)
    parser.add_argument("--network", choices=NETWORKS, default="digits")
    parser.add_argument("--polled", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sessions:
        make_sessions(Path(arguments.sessions[0]), int(arguments.sessions[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        one, many = Path(folder) / "one", Path(folder) / "many"
        for repository, count in ((one, 1), (many, arguments.loaded)):
            write(repository, count, arguments.network)
        costs: dict[str, list[Cost]] = {}
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            for which, repository in (("one", one), ("many", many)):
                costs.setdefault(f"server {which}", []).append(of_a_server(repository))
                costs.setdefault(f"sessions {which}", []).append(of_sessions(repository, THREADS))
        server, sessions = (
            least(costs[f"{each} many"]) - least(costs[f"{each} one"]) for each in ("server", "sessions")
        )
        for title, cost in (("the server", server), ("sessions alone", sessions)):
            more = f"{arguments.loaded - 1} more models of {arguments.network}"
            print(f"{title}: {more} take {cost.wall_s:.2f} s, CPU {cost.cpu_s:.2f} s")
        ratio, cpu_ratio = server.wall_s / sessions.wall_s, server.cpu_s / sessions.cpu_s
        print(f"ratio {ratio:.2f}, wanted at most {WANTED_RATIO}; of CPU {cpu_ratio:.2f}")
    with tempfile.TemporaryDirectory() as folder:
        taken_s = poll_s(write(Path(folder), arguments.polled), max(arguments.rounds, 3))
        print(f"a poll of {arguments.polled} models: {taken_s * 1000:.0f} ms of CPU, wanted at most {WANTED_POLL_S} s")


if __name__ == "__main__":
    main()
