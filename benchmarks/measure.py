"""Runs the same load on several servers in turns (A, B, B, A, ...) and takes medians."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import machine
from load import LoadFailed, Seen, statistics_of, successes_of
from servers import Running

T = TypeVar("T")
#: So often a run is begun before it is given up.
TRIES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of load. ``put`` puts it on a server for so many seconds; ``model`` maps the name
    of a server to the model asked there."""

    name: str
    model: Callable[[Running], str]
    put: Callable[[Running, float], Seen]


@dataclass(frozen=True, slots=True)
class Run:
    """One run. ``server_us`` is CPU per request of the server's process tree; ``other`` the share
    of the machine that neither server nor load generator took: the noise."""

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
    """``runs`` runs on each server, interleaved, after a short warm-up; less those that were given up.

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
    """What ``put`` gives, at the first of `TRIES` that does not fail; None if there is none, and a line says so."""
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
    count_before, executions_before = _counts(server, model)
    before = machine.read(server.pid)
    seen = case.put(server, seconds)
    after = machine.read(server.pid)
    count_after, executions_after = _counts(server, model)
    requests = (count_after - count_before) or seen.requests
    tree_s = after.tree_s - before.tree_s
    other_s = after.busy_s - before.busy_s - tree_s - seen.client_s
    batches = {size: n - executions_before.get(size, 0) for size, n in executions_after.items()}
    batches = {size: n for size, n in batches.items() if n}
    executions = sum(batches.values())
    return Run(
        seen.rps,
        seen.p50_us,
        seen.p99_us,
        tree_s / requests * 1e6,
        seen.client_s / requests * 1e6,
        machine.rss_mib(server.pid),
        max(0.0, other_s) / max(1e-9, after.total_s - before.total_s),
        sum(int(size) * n for size, n in batches.items()) / executions if executions else 0.0,
        batches,
    )


def median(runs: Sequence[Run], field: str) -> float:
    """Of one numeric field of `Run`."""
    values: list[float] = [getattr(run, field) for run in runs]
    return statistics.median(values)


def as_json(found: dict[str, list[Run]]) -> dict[str, object]:
    return {name: [asdict(run) for run in runs] for name, runs in found.items()}


def _counts(server: Running, model: str) -> tuple[int, dict[str, int]]:
    """Successful requests, and executions by batch size; nothing where there are no statistics."""
    if not server.has_statistics:
        return 0, {}
    document = statistics_of(server, model)  # with --workers, those of one: batches are then said to be too few
    batches = document.get("batch_stats", [])
    assert isinstance(batches, list)
    return successes_of(server, model), {
        str(each["batch_size"]): int(each["compute_infer"]["count"]) for each in batches
    }
