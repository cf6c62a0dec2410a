"""Tensors of 16 MiB in both directions, compared with ASGI servers that echo bodies."""

from __future__ import annotations

import tempfile
from pathlib import Path

import load
import servers
from measure import Case, as_json, compare, median
from report import Section
from settings import Settings, need_modules

ELEMENTS = 4 * 2**20
MIB = 4 * ELEMENTS / 2**20


def large_tensors(settings: Settings) -> Section:
    """One connection; MiB per second in each direction, and the memory that requests added.

    The growth of the server's peak memory, in tensors of 16 MiB, bounds the copies of a tensor
    that are alive at once; in an identity over HTTP the receive buffer itself is one.
    """
    need_modules("hypercorn", "uvicorn", "httptools")
    section = Section(
        "16 MiB FP32 there and back, 1 connection",
        ("server", "MiB/s each way (min..max)", "p50 ms", "server CPU ms/request", "peak memory, in tensors"),
    )
    body = load.binary_body("identity", {"INPUT0": (1, ELEMENTS)})
    case = Case(
        "16 MiB",
        lambda server: "identity",
        lambda server, seconds: load.one_by_one(server, body, seconds),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.headrace(settings.repository(Path(folder), "identity")) as headrace,
        servers.echo("hypercorn") as hypercorn,
        servers.echo("uvicorn") as uvicorn,
    ):
        running = [headrace, hypercorn, uvicorn]
        before = {server.name: _status_mib(server.pid, "VmRSS") for server in running}
        found = compare(case, running, settings.runs, settings.seconds)
        peaks = {server.name: _status_mib(server.pid, "VmHWM") - before[server.name] for server in running}
    for name, runs in found.items():
        rates = [run.rps * MIB for run in runs]
        section.rows.append(
            (
                name,
                f"{median(runs, 'rps') * MIB:,.0f} ({min(rates):,.0f}..{max(rates):,.0f})",
                f"{median(runs, 'p50_us') / 1000:.1f}",
                f"{median(runs, 'server_us') / 1000:.1f}",
                f"{peaks[name] / MIB:.1f}",
            )
        )
    section.raw = as_json(found)
    return section


def _status_mib(pid: int, key: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":"))
