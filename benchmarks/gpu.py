"""Headrace on a GPU, compared with each engine alone.

For one connection, the engine is behind a bare socket, with the same load. For more, another process calls the engine
in a loop, with the batch sizes of Headrace's run: rows from host memory, compute, rows back to host memory. Needs a
CUDA device, ``wrk``, and PyTorch or ``onnxruntime-gpu``.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import frameworks
import load
import servers
from bare_socket import BareSocket
from frameworks import FRAMEWORKS, Alone, write_networks
from measure import Case, Run, as_json, compare
from networks import SHAPES
from report import Section, Target
from servers import Running
from settings import Missing, Settings, need_modules, need_wrk

CONNECTIONS = (1, 16, 64)
#: The number of instances, and True if each has its own process, and so its own interpreter's lock.
SETTINGS = {"1": (1, "thread"), "2": (2, "thread"), "1 in a process": (1, "process")}
SHARE_WANTED = 0.95
COLUMNS = (
    "network", "engine", "instances", "connections", "requests/s", "the engine alone", "share", "p50 ms", "p99 ms",
    "CPU µs a request", "the engine's", "mean batch",
)  # fmt: skip


def device_name() -> str:
    """Return the name of GPU 0. Raises `Missing` if there is none."""
    if shutil.which("nvidia-smi") is None:
        raise Missing("a CUDA device")
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    return subprocess.check_output(query, text=True).strip()


def gpu(settings: Settings) -> Section:
    """Each network on each engine, at 1, 16 and 64 connections."""
    need_wrk()
    need_modules("onnx")
    section = Section(f"On a GPU ({device_name()})", COLUMNS)
    with tempfile.TemporaryDirectory() as made:
        installed = frameworks.installed("KIND_GPU")
        folder = write_networks(Path(made), installed)
        for engine in installed:
            framework = FRAMEWORKS[engine]
            loads = [f"--load-model={network}_{engine}" for network in framework.networks]
            with Alone(engine, folder, 0) as alone, BareSocket(engine, folder, 0) as bare:
                for setting, (instances, isolation) in SETTINGS.items():
                    for network in framework.networks:
                        config = folder / f"{network}_{engine}" / "config.pbtxt"
                        config.write_text(framework.config_of(network, instances, {"isolation": isolation}))
                    with servers.headrace(folder, "--model-control-mode=explicit", *loads) as server:
                        for network in framework.networks:
                            for connections in CONNECTIONS[setting != "1" :]:
                                other = bare if connections == 1 else alone
                                _measure(settings, section, server, other, engine, network, setting, connections)
    section.rows.sort(key=lambda row: (row[0], row[1]))
    return section


def _measure(
    settings: Settings,
    section: Section,
    server: Running,
    other: Alone | BareSocket,
    engine: str,
    network: str,
    setting: str,
    connections: int,
) -> None:
    model = f"{network}_{engine}"
    shape = f"INPUT0:{','.join(map(str, (1, *SHAPES[network])))}"

    def put(server: Running, seconds: float) -> load.Seen:
        threads = min(4, connections)
        return load.wrk(server, load.Body(model, b""), connections, seconds, load.VARIED, threads, ("binary", shape))

    case = Case(f"{network}, {engine} x {setting}, {connections}", lambda server: model, put)
    runs: list[Run] = []
    direct: list[frameworks.Direct] = []
    for _ in range(settings.runs):
        [run] = compare(case, [server], 1, settings.seconds)[server.name]
        runs.append(run)
        if isinstance(other, BareSocket):
            direct.append(other.ask(case, settings.seconds))
        else:
            direct.append(other.loop(network, settings.seconds, run.batches))
    share = median(run.rps / each.rows_per_s for run, each in zip(runs, direct, strict=True))
    section.rows.append(
        (
            network, engine, setting, str(connections), f"{median(run.rps for run in runs):,.0f}",
            f"{median(each.rows_per_s for each in direct):,.0f}", f"{share:.0%}",
            f"{median(run.p50_us for run in runs) / 1e3:.2f}", f"{median(run.p99_us for run in runs) / 1e3:.2f}",
            f"{median(run.server_us for run in runs):.0f}", f"{median(each.cpu_us for each in direct):.0f}",
            f"{median(run.batch for run in runs):.1f}",
        )
    )  # fmt: skip
    section.raw[case.name] = {
        "alone": [[each.rows_per_s, each.cpu_us] for each in direct],
        **as_json({"headrace": runs}),
    }
    section.targets.append(
        Target(
            f"{case.name}: share of the engine alone", f">= {SHARE_WANTED:.0%}", f"{share:.0%}", share >= SHARE_WANTED
        )
    )
