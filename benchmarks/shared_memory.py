"""Tensors of 1 and 16 MiB in system shared memory, compared with Triton, and with a call in the same process."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median as middle

import load
import numpy as np
import servers
from load import LoadFailed, Seen
from measure import Case, as_json, compare, median
from report import Section
from servers import Running
from settings import Settings

from headrace import Server

MIB = 1 << 20
ALLOW = "--allow-client-shm=true"


def shared_memory(settings: Settings) -> Section:
    """Run perf_analyzer with 1 connection, and a region each for input and output.

    ``identity`` is Headrace's own, ``pyident`` the same model of the Python backend, in a process on both servers.
    Triton has only the latter. ``copied`` is a server with ``--shm-copy-inputs``. The last rows are `Server.infer`
    without an output to copy, and a request of 16 floats.
    """
    analyzer = settings.yardstick("perf_analyzer")
    section = Section(
        "Shared memory, 1 connection",
        ("case", "server", "requests/s", "of Triton's", "p50 us", "server CPU us/request"),
    )
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        repository = settings.repository(Path(folder), "identity", "pyident")
        with (
            servers.headrace(repository, ALLOW, name="headrace identity") as headrace,
            servers.headrace(repository, ALLOW, "--shm-copy-inputs=true", name="headrace identity, copied") as copied,
            servers.triton(settings.yardsticks, settings.repository(Path(other), "pyident")) as triton,
        ):
            running = [headrace, copied, replace(headrace, name="headrace pyident"), triton]
            for protocol in ("http", "grpc"):
                for size in (MIB, 16 * MIB):
                    put = partial(_through_regions, analyzer, protocol, size)
                    name = f"{size // MIB} MiB, {protocol}"
                    found = compare(Case(name, _model, put), running, settings.runs, settings.seconds)
                    section.raw[name] = as_json(found)
                    triton_rps = median(found["triton"], "rps")
                    for server, runs in found.items():
                        rps = median(runs, "rps")
                        section.rows.append(
                            (
                                name,
                                server,
                                f"{rps:,.0f}",
                                f"{rps / triton_rps:.2f}",
                                f"{median(runs, 'p50_us'):,.0f}",
                                f"{median(runs, 'server_us'):,.0f}",
                            )
                        )
                small = partial(load.perf_analyzer, analyzer, headrace, protocol, "identity", 1, settings.seconds)
                with contextlib.suppress(LoadFailed):  # on a busy machine
                    p50_us = small("--shape", "INPUT0:16").p50_us
                    section.rows.append((f"16 floats, {protocol}", "headrace identity", "", "", f"{p50_us:,.0f}", ""))
        for model in ("identity", "pyident"):
            for size in (MIB, 16 * MIB):
                took = _in_process(repository, model, size, settings.seconds)
                section.rows.append((f"{size // MIB} MiB, in process", model, "", "", f"{took:,.0f}", ""))
    return section


def _model(server: Running) -> str:
    return "identity" if " identity" in server.name else "pyident"


def _through_regions(analyzer: Path, protocol: str, size: int, server: Running, seconds: float) -> Seen:
    words = ("--shape", f"INPUT0:{size // 4}", "--shared-memory", "system", "--output-shared-memory-size", str(size))
    return load.perf_analyzer(analyzer, server, protocol, _model(server), 1, seconds, *words)


def _in_process(repository: Path, model: str, size: int, seconds: float) -> float:
    """Return the median time of a call in us."""
    tensor = np.zeros((1, size // 4), np.float32)
    times: list[float] = []
    with Server(repository) as server:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begun = time.perf_counter()
            server.infer(model, {"INPUT0": tensor})
            times.append(time.perf_counter() - begun)
    return middle(times) * 1e6
