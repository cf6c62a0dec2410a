"""Measure the rows per second of `headrace batch`, compared with the engine called directly with its best batch size.

    python benchmarks/offline_batches.py [--networks mlp,convnet] [--seconds 10] [--runs 3] [--alone]

Both read rows of a NumPy file and write another. The engine is ONNX Runtime with its default settings, in a bare loop,
without its start and load. ``max_batch_size`` of the model is the best batch size.

==========  ====================================================================================
``steady``  the rows of the second half of a job, by the time of a whole job less that of half a job
``whole``   all rows of the job, by its time from the start of the interpreter
==========  ====================================================================================

``CPU`` is the CPU time per row, without other programs of the machine. ``cores`` is CPU time over time: if the two
programs differ in it, other programs used the rest, and the rates are not comparable. ``--alone`` waits for a time
without other programs, and repeats disturbed measurements. All figures are medians; engine, half job and whole job
alternate. Outputs are compared.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import networks
import numpy as np
import onnxruntime

SIZES = (1, 4, 16, 64, 256)
T = TypeVar("T")
#: With ``--alone``, the cores that other programs may take.
MOST_OTHERS = 0.15


class Cost(NamedTuple):
    """The cost of some rows, in seconds."""

    time_s: float
    cpu_s: float


def ask(session: onnxruntime.InferenceSession, rows: networks.Array, size: int) -> tuple[Cost, networks.Array]:
    """Compute all ``rows`` by the engine in batches of ``size``. Return the cost and the outputs."""
    began, before = time.perf_counter(), time.process_time()
    found = [session.run(None, {"INPUT0": rows[first : first + size]})[0] for first in range(0, len(rows), size)]
    return Cost(time.perf_counter() - began, time.process_time() - before), np.concatenate(found)


def job(models: Path, network: str, source: Path) -> Cost:
    """Return the cost of a job, from the start of its interpreter to its end."""
    words = [f"--model-repository={models}", f"--model={network}", f"--input={source}", "--overwrite"]
    headrace = Path(sys.executable).with_name("headrace")
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [headrace, "batch", *words, f"--output={source.with_name('out.npy')}"], check=True, stderr=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(time.perf_counter() - began, cpu_s)


def busy_s() -> float:
    """Return the CPU time of all programs since the machine has started: ``/proc/stat``, in ticks."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def undisturbed(measured: Callable[[], T], is_alone: bool) -> T:
    """Return the result of ``measured``; if ``is_alone``, of a call while no other program runs."""
    while True:
        while is_alone:
            before = busy_s()
            time.sleep(0.5)
            if busy_s() - before < 0.5 * MOST_OTHERS:
                break
        began, before, own = time.perf_counter(), busy_s(), sum(os.times()[:4])
        found = measured()
        taken = busy_s() - before - (sum(os.times()[:4]) - own)
        if not is_alone or taken < MOST_OTHERS * (time.perf_counter() - began):
            return found


def measure(folder: Path, network: str, seconds: float, runs: int, is_alone: bool) -> str:
    model = folder / network / "1/model.onnx"
    model.parent.mkdir(parents=True)
    model.write_bytes(networks.onnx_bytes(network))
    session = onnxruntime.InferenceSession(model)
    rng = np.random.default_rng(0)
    trial = rng.random((2048, *networks.SHAPES[network]), np.float32)
    took, best = undisturbed(
        lambda: min((min(ask(session, trial, size)[0].time_s for _ in range(3)), size) for size in SIZES), is_alone
    )
    (folder / network / "config.pbtxt").write_text(f'backend: "onnxruntime" max_batch_size: {best}')

    rows = np.resize(trial, (int(len(trial) / took * seconds) // 2 * 2, *trial.shape[1:]))
    whole, half = folder / "in.npy", folder / "half.npy"
    np.save(whole, rows)
    np.save(half, rows[: len(rows) // 2])
    direct: list[Cost] = []
    halves: list[Cost] = []
    wholes: list[Cost] = []
    for _ in range(runs):
        cost, expected = undisturbed(lambda: ask(session, np.load(whole, mmap_mode="r"), best), is_alone)
        direct.append(cost)
        halves.append(undisturbed(lambda: job(folder, network, half), is_alone))
        wholes.append(undisturbed(lambda: job(folder, network, whole), is_alone))
        np.testing.assert_allclose(np.load(folder / "out.npy"), expected, rtol=1e-3, atol=1e-4)
    engine, first, full = map(middle, (direct, halves, wholes))
    steady = Cost(2 * (full.time_s - first.time_s), 2 * (full.cpu_s - first.cpu_s))
    shown = [f"{network}: {len(rows):,} rows, batches of {best}"]
    for name, cost in {"engine": engine, "steady": steady, "whole": full}.items():
        rate, cpu_us = len(rows) / cost.time_s, 1e6 * cost.cpu_s / len(rows)
        parts = f"({engine.time_s / cost.time_s:.2f})", f"({cost.cpu_s / engine.cpu_s:.2f})"
        cores = f"{cost.cpu_s / cost.time_s:.2f} cores"
        shown.append(f"  {name:<7} {rate:>9,.0f} rows/s {parts[0]}, CPU {cpu_us:>6.1f} us {parts[1]}, {cores}")
    return "\n".join(shown)


def middle(costs: list[Cost]) -> Cost:
    return Cost(*map(statistics.median, zip(*costs, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="mlp,convnet", help="of networks.py")
    parser.add_argument("--seconds", type=float, default=10, help="of the engine alone")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="measure when no other program runs")
    arguments = parser.parse_args()
    for network in arguments.networks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            print(measure(Path(folder), network, arguments.seconds, arguments.runs, arguments.alone), flush=True)


if __name__ == "__main__":
    main()
