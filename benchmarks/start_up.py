"""The cost to import Headrace, to start it, and to keep it idle."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import servers
from report import Section, Target
from settings import Settings

IMPORT_MS = 150
IMPORTS = 9
STARTS = 6
#: Smaller differences are noise.
BESIDE_ONE = 1.05
ENGINES = ("onnxruntime", "torch", "tensorflow", "tensorrt", "openvino")


def start_up(settings: Settings) -> Section:
    """Import time, start-up time and idle memory of a server with one small model."""
    section = Section("Import, start and idle", ("figure", "value"))
    seconds = {code: [_python_s(code) for _ in range(IMPORTS)] for code in ("pass", "import headrace")}
    import_ms = 1000 * (statistics.median(seconds["import headrace"]) - statistics.median(seconds["pass"]))
    loaded = _output(f"import sys, headrace; print(*[name for name in {ENGINES} if name in sys.modules])")
    section.rows += [
        ("`import headrace`, above an empty Python", f"{import_ms:.0f} ms"),
        ("engines it imports", loaded or "none"),
        ("slowest modules in it, alone", ", ".join(_slowest())),
    ]
    section.targets += [
        Target("import headrace", f"< {IMPORT_MS} ms", f"{import_ms:.0f} ms", import_ms < IMPORT_MS),
        Target("engines imported by it", "none", loaded or "none", not loaded),
    ]
    for model in ("identity", "tiny_add"):
        start_s, rss_mib = _idle(settings, model)
        section.rows += [
            (f"start until ready, one model ({model})", f"{start_s:.2f} s"),
            (f"memory when idle, one model ({model})", f"{rss_mib:.0f} MiB"),
        ]
        section.raw[model] = {"start_s": start_s, "rss_mib": rss_mib}
    section.raw["seconds"] = seconds
    _beside_one_engine(settings, section)
    return section


def _beside_one_engine(settings: Settings, section: Section) -> None:
    """The cost of other installed engines for a server with one small ONNX model. Both alternate."""
    starts: dict[str, list[float]] = {"all": [], "one": []}
    with tempfile.TemporaryDirectory() as folder:
        repository = settings.repository(Path(folder), "tiny_add")
        for turn in range(2 * STARTS):
            which = "all" if turn % 4 in (0, 3) else "one"
            with servers.headrace(repository, *(["--plugins=onnxruntime"] if which == "one" else [])) as headrace:
                starts[which].append(headrace.start_s)
    with_all, with_one = (statistics.median(found) for found in starts.values())
    wanted, ratio = f"<= {BESIDE_ONE:.0%} of {with_one:.2f} s with ONNX Runtime alone", with_all / with_one
    found = f"{with_all:.2f} s, {ratio:.0%}"
    section.targets.append(
        Target("start, one small ONNX model, all plugins installed", wanted, found, ratio <= BESIDE_ONE)
    )
    section.raw["starts"] = starts


def _idle(settings: Settings, model: str) -> tuple[float, float]:
    """Medians of three starts; memory is read two seconds after readiness."""
    starts, memories = [], []
    for _ in range(3):
        with (
            tempfile.TemporaryDirectory() as folder,
            servers.headrace(settings.repository(Path(folder), model)) as headrace,
        ):
            time.sleep(2)
            starts.append(headrace.start_s)
            memories.append(machine.rss_mib(headrace.pid))
    return statistics.median(starts), statistics.median(memories)


def _python_s(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started


def _output(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def _slowest() -> list[str]:
    """The five modules with the most time of their own, by ``-X importtime``."""
    command = [sys.executable, "-X", "importtime", "-c", "import headrace"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stderr.splitlines()
    fields = [line.removeprefix("import time:").split("|") for line in lines if line.startswith("import time:")]
    own = [(int(us), name.strip()) for us, _, name in fields if us.strip().isdigit()]
    return [f"{name} {us / 1000:.0f} ms" for us, name in sorted(own, reverse=True)[:5]]
