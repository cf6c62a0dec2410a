"""Dynamic batching at an open-loop load of 80 % of the server's maximum, compared with a simulation of the same policy.

The server itself measures how long requests are queued. So a late generator changes the arrivals, but not the measured
waits. The simulation gets the same arrivals.
"""

from __future__ import annotations

import re
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import load
import servers
from batching_oracle import Outcome, Policy, simulate
from open_loop import Load, Order, put
from report import Section, Target
from servers import Running
from settings import Settings

OFFERED = 0.8
SHARE_OF_ORACLE = 0.9
#: With the allowed 2 ms more, it is a bound of the server's histogram, so that the share below it is exact.
DELAY_US = 2096
ALLOWED_US = DELAY_US + 2000
MOST = 64
#: The connections of the closed loop that measures the server's maximum.
CONNECTIONS = 64
#: A generator that is later than this sends bursts, which are harder for the server and the oracle.
LATE_US = 1000.0
_COLUMNS = (
    "offered/s", "answered/s", "mean batch", "oracle", "share", f"queued <= {ALLOWED_US} µs", "oracle's",
    "oracle p99 µs", "latency p99 µs", "generator late p99 µs",
)  # fmt: skip


def batching(settings: Settings) -> Section:
    """mlp with a queue delay, at Poisson arrivals."""
    section = Section(f"Dynamic batching at {OFFERED:.0%} offered load (mlp, delay {DELAY_US} µs)", _COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        repository = settings.repository(Path(folder) / "models", "mlp")
        config = repository / "mlp" / "config.pbtxt"
        rule = f"dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }}"
        config.write_text(config.read_text().replace("dynamic_batching { }", rule))
        assert rule in config.read_text()
        request = _write_request(Path(folder))
        shares, on_time, late = [], [], []
        with servers.headrace(repository) as server:
            put(Order(server.http, str(request), 0, 1.0, CONNECTIONS))  # warm
            for number in range(settings.runs):
                closed = put(Order(server.http, str(request), 0, settings.seconds, CONNECTIONS))
                rate = OFFERED * closed.answered / closed.elapsed_s
                share, within, seen = _run(section, server, request, rate, settings.seconds, number)
                shares.append(share)
                on_time.append(within)
                late.append(seen.late_us["p99"])
    if median(late) > LATE_US:
        warning = f"the generator was {median(late):,.0f} µs late at p99: server and oracle had arrivals in bursts"
        section.rows.append((warning, *[""] * 9))
    section.targets += [
        Target(
            "mean batch beside the oracle's", f">= {SHARE_OF_ORACLE:.0%}", f"{median(shares):.1%}",
            median(shares) >= SHARE_OF_ORACLE,
        ),
        Target(
            f"queued at most max_queue_delay + 2 ms ({ALLOWED_US} µs)", ">= 99 %", f"{median(on_time):.2%}",
            median(on_time) >= 0.99,
        ),
    ]  # fmt: skip
    return section


def _run(
    section: Section, server: Running, request: Path, rate: float, seconds: float, seed: int
) -> tuple[float, float, Load]:
    """Return the mean batch over the oracle's, the share of requests queued no longer than allowed, and the load."""
    sizes, queued = _batch_stats(server), _queued(server)
    seen = put(Order(server.http, str(request), rate, seconds, seed=seed))
    if seen.failed:
        raise RuntimeError(f"{seen.failed} of {len(seen.sent_ns)} requests failed")
    ran = {size: _less(stats, sizes.get(size, (0, 0))) for size, stats in _batch_stats(server).items()}
    ran = {size: stats for size, stats in ran.items() if stats[0]}
    mean = sum(size * count for size, (count, _) in ran.items()) / sum(count for count, _ in ran.values())
    oracle = simulate(seen.sent_ns, Policy(MOST, DELAY_US * 1000), _execution(ran))
    after = _queued(server)
    within = (after[0] - queued[0]) / (after[1] - queued[1])
    section.rows.append((
        f"{rate:,.0f}", f"{seen.answered / seen.elapsed_s:,.0f}", f"{mean:.2f}", f"{oracle.mean_batch:.2f}",
        f"{mean / oracle.mean_batch:.1%}", f"{within:.2%}", f"{_share_within(oracle):.2%}",
        f"{oracle.wait_ns(0.99) / 1000:,.0f}",
        f"{seen.latency_us['p99']:,.0f}", f"{seen.late_us['p99']:,.0f}",
    ))  # fmt: skip
    section.raw[f"run {seed}"] = {"late_us": seen.late_us, "latency_us": seen.latency_us, "batches": ran}
    return mean / oracle.mean_batch, within, seen


def _share_within(oracle: Outcome) -> float:
    waits = oracle.waits_ns.values()
    return sum(wait_ns <= ALLOWED_US * 1000 for wait_ns in waits) / len(waits)


def _write_request(folder: Path) -> Path:
    body = load.binary_body("mlp", {"INPUT0": (1, 256)})
    head = "".join(f"{name}: {value}\r\n" for name, value in body.headers.items())
    path = folder / "request"
    text = f"POST {body.path} HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {len(body.data)}\r\n\r\n"
    path.write_bytes(text.encode() + body.data)
    return path


def _batch_stats(server: Running) -> dict[int, tuple[int, int]]:
    """Return the number of executions by rows, and their nanoseconds from stacking to splitting."""
    stats = load.statistics_of(server, "mlp")["batch_stats"]
    assert isinstance(stats, list)
    parts = ("compute_input", "compute_infer", "compute_output")
    return {
        int(each["batch_size"]): (int(each["compute_infer"]["count"]), sum(int(each[part]["ns"]) for part in parts))
        for each in stats
    }


def _less(after: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return after[0] - before[0], after[1] - before[1]


def _execution(ran: Mapping[int, tuple[int, int]]) -> Callable[[int], int]:
    """Return the time of a batch as a linear function of its rows, fitted to the executions."""
    points = [(size, ns / count, count) for size, (count, ns) in ran.items()]
    weight = sum(count for *_, count in points)
    mean_x = sum(size * count for size, _, count in points) / weight
    mean_y = sum(ns * count for _, ns, count in points) / weight
    spread = sum(count * (size - mean_x) ** 2 for size, _, count in points)
    slope = sum(count * (size - mean_x) * (ns - mean_y) for size, ns, count in points) / spread if spread else 0.0
    return lambda rows: max(1, round(mean_y + slope * (rows - mean_x)))


def _queued(server: Running) -> tuple[int, int]:
    """Return the number of requests of mlp that waited no longer than allowed, and the number of all."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = dict(
        re.findall(r'^nv_inference_queue_histogram_us_bucket{[^}]*le="([^"]+)"[^}]*} (\S+)$', text, re.MULTILINE)
    )
    bounds = {float(bound): int(float(count)) for bound, count in found.items()}
    return bounds[float(ALLOWED_US)], bounds[float("inf")]
