"""The results of a section, and their text."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from measure import Run, median
from python_build import build
from wake_up import wake_up_us


@dataclass(slots=True)
class Target:
    """A figure and its target."""

    figure: str
    wanted: str
    measured: str
    is_met: bool


@dataclass(slots=True)
class Section:
    """One table, its targets, and the raw runs."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    raw: dict[str, object] = field(default_factory=dict)


LOAD_COLUMNS = (
    "case",
    "server",
    "requests/s (min..max)",
    "p50 µs",
    "p99 µs",
    "server CPU µs/request",
    "client CPU µs/request",
    "mean batch",
    "other CPU",
)


def load_row(case: str, server: str, runs: Sequence[Run]) -> Sequence[str]:
    """Return the medians of ``runs``, for `LOAD_COLUMNS`."""
    rates = [run.rps for run in runs]
    return (
        case,
        server,
        f"{median(runs, 'rps'):,.0f} ({min(rates):,.0f}..{max(rates):,.0f})",
        f"{median(runs, 'p50_us'):,.0f}",
        f"{median(runs, 'p99_us'):,.0f}",
        f"{median(runs, 'server_us'):,.1f}",
        f"{median(runs, 'client_us'):,.1f}",
        f"{median(runs, 'batch'):.1f}",
        f"{median(runs, 'other'):.0%}",
    )


def markdown(sections: Sequence[Section], pythons: Sequence[str] = ()) -> str:
    """Return the targets, then a table per section. ``pythons`` as for `machine_line`."""
    targets = [
        (target.figure, target.wanted, target.measured, "yes" if target.is_met else "**no**")
        for section in sections
        for target in section.targets
    ]
    parts = [machine_line(pythons)]
    if targets:
        parts.append(table(("figure", "wanted", "measured", "met"), targets))
    for section in sections:
        parts += [f"## {section.title}", table(section.columns, section.rows)]
    return "\n\n".join(parts) + "\n"


def write(sections: Sequence[Section], folder: Path, command: Sequence[str], pythons: Sequence[str] = ()) -> None:
    """Write ``perf.json`` with every run, and ``perf.md``. ``pythons`` as for `machine_line`."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": machine_line(pythons),
        "command": list(command),
        "sections": [asdict(section) for section in sections],
    }
    (folder / "perf.json").write_text(json.dumps(document, indent=1))
    (folder / "perf.md").write_text(markdown(sections, pythons))


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The state of the machine before the first load: the time of a wake-up, and the CPU times so far."""

    wake_up_us: float
    total_s: float
    stolen_s: float

    @classmethod
    def now(cls) -> _Beginning:
        times = psutil.cpu_times()
        return cls(wake_up_us(), sum(times[:8]), times.steal)


#: Measured when this module is imported, before the other figures.
_BEGAN = _Beginning.now()


def machine_line(pythons: Sequence[str] = ()) -> str:
    """Return the cores, the time of a wake-up, the share of stolen CPU time since the start, the builds
    of Python that ran the servers (that of this process unless given), and the commit."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    times = psutil.cpu_times()
    stolen = (times.steal - _BEGAN.stolen_s) / max(1e-9, sum(times[:8]) - _BEGAN.total_s)
    return (
        f"{os.cpu_count()} CPUs ({model}), a wake-up {_BEGAN.wake_up_us:.1f} µs, {stolen:.0%} of the CPU stolen by "
        f"others; {', '.join(dict.fromkeys(filter(None, pythons))) or build()}; commit {commit.stdout.strip()}"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
