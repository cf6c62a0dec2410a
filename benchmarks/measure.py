"""Runs the same load on alternating servers (A, B, B, A, ...) and takes medians."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import machine
from load import Counted, LoadFailed, Seen, counted_by, statistics_of
from servers import Running

T = TypeVar("T")
#: The attempts of a run.
TRIES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of load. ``put(server, seconds)`` sends it; ``model`` maps the name of a server to its model."""

    name: str
    model: Callable[[Running], str]
    put: Callable[[Running, float], Seen]


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    - ``server_us``: CPU per request of the server's process tree.
    - ``other``: the share of the machine that other programs used.
    - ``batch``: the mean batch size of all executions.
    - ``batches``: the executions of each size, for a server of one process.
    """

    rps: float
    p50_us: float
    p99_us: float
    server_us: float
    client_us: float
    rss_mib: float
    other: float
    batch: float
    batches: dict[str, int]


def compare(case: Case, servers: Sequence[Running], runs: int, seconds: float) -> dict[str, list[Run]]:
    """Return the successful ones of ``runs`` runs on each server, interleaved, after a short warm-up.

    Raises `LoadFailed` if a server has none.
    """
    found: dict[str, list[Run]] = {server.name: [] for server in servers}
    for server in servers:
        _try(case, server, "the warm-up", partial(case.put, server, min(1.0, seconds)))
    for turn in range(runs):
        for server in servers if turn % 2 == 0 else servers[::-1]:
            run = _try(case, server, f"run {turn + 1}", partial(measure, case, server, seconds))
            if run is None:
                continue
            found[server.name].append(run)
            print(
                f"{case.name:32} {server.name:18} run {turn + 1}/{runs}: {run.rps:9,.1f}/s  p50 {run.p50_us:9,.0f} us  "
                f"server {run.server_us:8,.1f} us/request  batch {run.batch:4.1f}  other {run.other:4.0%}",
                file=sys.stderr,
            )
    if without := [name for name, done in found.items() if not done]:
        raise LoadFailed(f"no run on {', '.join(without)} gave figures")
    return found


def _try(case: Case, server: Running, what: str, put: Callable[[], T]) -> T | None:
    """Return the result of ``put``, after at most `TRIES` attempts. If all fail, print a line and return None."""
    for attempt in range(1, TRIES + 1):
        try:
            return put()
        except LoadFailed as failed:
            after = "given up" if attempt == TRIES else "tried again"
            words = " ".join(str(failed).split())[-160:]
            print(f"{case.name:32} {server.name:18} {what} {after} after {attempt}: ...{words}", file=sys.stderr)
    return None


def measure(case: Case, server: Running, seconds: float) -> Run:
    model = case.model(server)
    counted_before, sizes_before = _counts(server, model)
    before = machine.read(server.pid)
    seen = case.put(server, seconds)
    after = machine.read(server.pid)
    counted, sizes = _counts(server, model)
    requests = (counted.successes - counted_before.successes) or seen.requests
    executions = counted.executions - counted_before.executions
    tree_s = after.tree_s - before.tree_s
    other_s = after.busy_s - before.busy_s - tree_s - seen.client_s
    return Run(
        seen.rps,
        seen.p50_us,
        seen.p99_us,
        tree_s / requests * 1e6,
        seen.client_s / requests * 1e6,
        machine.rss_mib(server.pid),
        max(0.0, other_s) / max(1e-9, after.total_s - before.total_s),
        (counted.rows - counted_before.rows) / executions if executions else 0.0,
        {size: n - sizes_before.get(size, 0) for size, n in sizes.items() if n > sizes_before.get(size, 0)},
    )


def median(runs: Sequence[Run], field: str) -> float:
    """Return the median of one numeric field of `Run`."""
    values: list[float] = [getattr(run, field) for run in runs]
    return statistics.median(values)


def as_json(found: dict[str, list[Run]]) -> dict[str, object]:
    return {name: [asdict(run) for run in runs] for name, runs in found.items()}


def _counts(server: Running, model: str) -> tuple[Counted, dict[str, int]]:
    """Return the counts of the model, and its executions by batch size; empty without statistics."""
    if not server.has_statistics:
        return Counted(0, 0, 0), {}
    batches = statistics_of(server, model).get("batch_stats", [])
    assert isinstance(batches, list)
    sizes = {str(each["batch_size"]): int(each["compute_infer"]["count"]) for each in batches}
    return counted_by(server, model), sizes
