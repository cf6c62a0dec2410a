"""Several workers compared with one server: requests of 16 floats to an identity, with more cores than workers.

The load generator has as many threads as cores, so that it is not the bottleneck.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import load
import servers
from measure import Case, as_json, compare, median
from report import Section
from servers import Running
from settings import Settings, need_wrk

WORKERS = (0, 1, 2, 4, 8)
CONNECTIONS = (16, 64, 256)
COLUMNS = ("load", "workers", "requests/s", "of one server's", "CPU µs a request", "p50 µs", "p99 µs")


def workers(settings: Settings) -> Section:
    """``--workers`` from 1 to 8, or to half of the cores; 0 is one server without a supervisor."""
    need_wrk()
    cores = os.cpu_count() or 1
    section = Section(f"Workers, on {cores} cores", COLUMNS)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        repository = settings.repository(Path(folder), "identity")
        counts = [count for count in WORKERS if count <= max(2, cores // 2)]
        running = [
            started.enter_context(servers.headrace(repository, f"--workers={count}", name=str(count)))
            for count in counts
        ]
        for form in ("json", "binary"):
            for connections in CONNECTIONS:
                name = f"{form}, {connections} connections"
                put = partial(_put, form, connections, max(1, min(6, cores // 2)))
                found = compare(Case(name, lambda server: "identity", put), running, settings.runs, settings.seconds)
                one = median(found["0"], "rps")
                section.rows += [
                    (
                        name, count, f"{median(runs, 'rps'):,.0f}", f"{median(runs, 'rps') / one:.2f}",
                        f"{median(runs, 'server_us'):.1f}", f"{median(runs, 'p50_us'):.0f}",
                        f"{median(runs, 'p99_us'):.0f}",
                    )
                    for count, runs in found.items()
                ]  # fmt: skip
                section.raw[name] = as_json(found)
    return section


def _put(form: str, connections: int, threads: int, server: Running, seconds: float) -> load.Seen:
    return load.wrk(server, load.Body("identity", b""), connections, seconds, load.VARIED, threads, (form,))
