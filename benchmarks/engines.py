"""Headrace compared with each engine alone, with the same number of threads.

- One connection: the engine behind a bare socket, with the same load. Client, server and engine run one after the
  other, and the machine needs time to wake each.
- More connections: the engine called in a loop, with the batch sizes of Headrace's run. All share the cores. The bound
  of the rate follows from the CPU time of the load generator and the engine, and 40 us per request for the server. It
  is at most the rate of the engine alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import frameworks
import load
import servers
from bare_socket import BareSocket
from frameworks import FRAMEWORKS, Alone, Direct, write_networks
from measure import Case, Run, as_json, compare
from networks import NETWORKS, SHAPES
from report import Section, Target
from servers import Running
from settings import Settings, need_modules, need_wrk

MANY = 16
SHARE_WANTED = 0.95
OWN_US_WANTED = 40.0
#: The threads of every engine and instance, so that the compared programs compute the same way.
THREADS = 1
COLUMNS = (
    "network", "engine", "connections", "requests/s", "the engine alone", "share", "bound", "share of the bound",
    "CPU µs beyond the engine's", "the engine's", "mean batch",
)  # fmt: skip


class ThreadSetting(NamedTuple):
    """Instances of each worker, and threads of each instance; for 0, Headrace chooses."""

    instances: int
    threads: int
    workers: int = 1

    def __str__(self) -> str:
        each = f"{self.instances} x {self.threads or 'default'}"
        return each if self.workers == 1 else f"{self.workers} workers, {each}"


SETTINGS = [ThreadSetting(*each) for each in ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (4, 1), (1, 1, 2))]
THREADS_COLUMNS = ("network", "engine", *map(str, SETTINGS))


def engines(settings: Settings) -> Section:
    """Each network on each engine that is installed, over HTTP."""
    need_wrk()
    need_modules("onnx")
    section = Section("Each engine behind Headrace, and called directly", COLUMNS)
    with tempfile.TemporaryDirectory() as made:
        installed = frameworks.installed()
        folder = write_networks(Path(made), installed)
        for engine in installed:
            _set_config(folder, engine, 1, THREADS)
            with (
                _server(folder, engine) as server,
                Alone(engine, folder, THREADS) as alone,
                BareSocket(engine, folder, THREADS) as bare,
            ):
                for network in FRAMEWORKS[engine].networks:
                    ask = partial(_measure, settings, section, server, engine, network)
                    ask(1, partial(_behind_a_socket, bare, engine, network, settings.seconds))
                    ask(MANY, partial(_in_a_loop, alone, network, settings.seconds))
    section.rows.sort(key=lambda row: (list(NETWORKS).index(row[0]), int(row[2])))
    return section


def _behind_a_socket(bare: BareSocket, engine: str, network: str, seconds: float, run: Run) -> Direct:
    return bare.ask(_case(engine, network, 1), seconds)


def _in_a_loop(alone: Alone, network: str, seconds: float, run: Run) -> Direct:
    return alone.loop(network, seconds, run.batches)


def _measure(
    settings: Settings,
    section: Section,
    server: Running,
    engine: str,
    network: str,
    connections: int,
    alone: Callable[[Run], Direct],
) -> None:
    """Return a row; ``alone`` is the result of the engine without Headrace."""
    case = _case(engine, network, connections)
    runs: list[Run] = []
    direct: list[Direct] = []
    for _ in range(settings.runs):
        [run] = compare(case, [server], 1, settings.seconds)[server.name]
        runs.append(run)
        direct.append(alone(run))
    shares = [run.rps / each.rows_per_s for run, each in zip(runs, direct, strict=True)]
    bounds = [bound(run, each, connections) / each.rows_per_s for run, each in zip(runs, direct, strict=True)]
    reached = median(share / most for share, most in zip(shares, bounds, strict=True))
    own_us = median(run.server_us - each.cpu_us for run, each in zip(runs, direct, strict=True))
    section.rows.append(
        (
            network, engine, str(connections), f"{median(run.rps for run in runs):,.0f}",
            f"{median(each.rows_per_s for each in direct):,.0f}", f"{median(shares):.0%}", f"{median(bounds):.0%}",
            _bold(f"{reached:.0%}", reached < SHARE_WANTED), _bold(f"{own_us:.0f}", own_us > OWN_US_WANTED),
            f"{median(each.cpu_us for each in direct):.0f}", f"{median(run.batch for run in runs):.1f}",
        )
    )  # fmt: skip
    section.raw[case.name] = {
        "alone": [[each.rows_per_s, each.cpu_us] for each in direct],
        **as_json({"headrace": runs}),
    }
    is_met = reached >= SHARE_WANTED
    section.targets += [
        Target(f"{case.name}: share of the bound", f">= {SHARE_WANTED:.0%}", f"{reached:.0%}", is_met),
        Target(f"{case.name}: CPU beyond the engine's", "<= 40 µs", f"{own_us:.0f} µs", own_us <= OWN_US_WANTED),
    ]


def bound(run: Run, alone: Direct, connections: int) -> float:
    """Return the requests per second of this machine if the server takes exactly the allowed CPU time."""
    if connections == 1:
        return alone.rows_per_s
    each_us = alone.cpu_us + run.client_us + OWN_US_WANTED
    return min(alone.rows_per_s, (os.cpu_count() or 1) * 1e6 / each_us)


def threads(settings: Settings) -> Section:
    """Requests a second at 16 connections, by instances and threads of each, and by workers."""
    need_wrk()
    need_modules("onnx")
    section = Section("Instances and threads: requests/s (CPU µs a request)", THREADS_COLUMNS)
    with tempfile.TemporaryDirectory() as made:
        installed = [name for name in frameworks.installed() if name == FRAMEWORKS[name].backend]
        folder = write_networks(Path(made), installed)
        found: dict[tuple[str, str], list[str]] = {}
        for engine in installed:
            for setting in SETTINGS:
                _set_config(folder, engine, setting.instances, setting.threads)
                with _server(
                    folder, engine, *([f"--workers={setting.workers}"] if setting.workers > 1 else [])
                ) as server:
                    for network in ("mlp", "transformer"):
                        case = _case(engine, network, MANY)
                        runs = compare(case, [server], settings.runs, settings.seconds)[server.name]
                        rate, cpu_us = median(run.rps for run in runs), median(run.server_us for run in runs)
                        found.setdefault((network, engine), []).append(f"{rate:,.0f} ({cpu_us:,.0f})")
    section.rows += [(network, engine, *cells) for (network, engine), cells in sorted(found.items())]
    return section


def _set_config(folder: Path, engine: str, instances: int, count: int) -> None:
    parameters: Mapping[str, str] = FRAMEWORKS[engine].threads_of(instances, count) if count else {}
    for network in FRAMEWORKS[engine].networks:
        path = folder / f"{network}_{engine}" / "config.pbtxt"
        path.write_text(FRAMEWORKS[engine].config_of(network, instances, parameters))


@contextmanager
def _server(folder: Path, engine: str, *flags: str) -> Iterator[Running]:
    """A server with the models of one engine."""
    loads = [f"--load-model={network}_{engine}" for network in FRAMEWORKS[engine].networks]
    with servers.headrace(folder, "--model-control-mode=explicit", *loads, *flags) as server:
        yield server


def _case(engine: str, network: str, connections: int) -> Case:
    """The load: all requests differ."""
    model = f"{network}_{engine}"
    shape = f"INPUT0:{','.join(map(str, (1, *SHAPES[network])))}"

    def put(server: Running, seconds: float) -> load.Seen:
        return load.wrk(server, load.Body(model, b""), connections, seconds, load.VARIED, 1, ("binary", shape))

    return Case(f"{network}, {engine}, {connections}", lambda server: model, put)


def _bold(text: str, is_missed: bool) -> str:
    return f"**{text}**" if is_missed else text
