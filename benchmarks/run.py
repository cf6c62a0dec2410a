"""Measures Headrace: ``python benchmarks/run.py``; ``--help`` for parts of it and shorter runs.

Needs Linux, ``wrk`` and the requirements of tests and benchmarks. A real Triton from ``yardsticks.py`` runs beside
Headrace, if there is one. Parts without their requirements are skipped, with a line.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import python_models
import report
from batching import batching
from engines import engines, threads
from gpu import gpu
from gpu_pair import gpu_pair
from large_tensors import large_tensors
from load import LoadFailed
from mixed_load import mixed_load
from models import write_models
from servers import BENCHMARKS
from settings import Missing, Settings
from shared_memory import shared_memory
from small_requests import pyident, tiny_add
from start_up import start_up
from workers import workers
from yardsticks import DEFAULT

SECTIONS = {
    "start": start_up,
    "tiny": tiny_add,
    "triton": pyident,
    "engines": engines,
    "threads": threads,
    "gpu": gpu,
    "gpu-pair": gpu_pair,
    "workers": workers,
    "batching": batching,
    "large": large_tensors,
    "shm": shared_memory,
    "mixed": mixed_load,
    "python": python_models.small,
    "python-large": python_models.large,
    "python-strings": python_models.strings,
    "python-calls": python_models.calls,
    "python-cycles": python_models.cycles,
}


def main() -> int:
    options = _parse()
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or write_models(Path(folder))
        settings = Settings(options.runs, options.seconds, options.soak_minutes, models, options.yardsticks)
        sections = []
        for name in options.only or SECTIONS:
            try:
                sections.append(SECTIONS[name](settings))
            except Missing as missing:
                print(f"{name}: skipped, missing {missing}", file=sys.stderr)
            except LoadFailed as failed:
                print(f"{name}: left out, {failed}", file=sys.stderr)
            report.write(sections, options.out, sys.argv)
    print(report.markdown(sections))
    print(f"wrote {options.out}/perf.json and perf.md", file=sys.stderr)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; all unless given")
    parser.add_argument("--runs", type=int, default=5, help="per case and server, interleaved")
    parser.add_argument("--seconds", type=float, default=5, help="per run")
    parser.add_argument("--soak-minutes", type=float, default=10, help="length of the mixed load")
    parser.add_argument("--models", type=Path, help="what models.py wrote; made anew unless given")
    parser.add_argument("--yardsticks", type=Path, default=DEFAULT)
    parser.add_argument("--out", type=Path, default=BENCHMARKS.parent / "build" / "perf", help="folder of the results")
    options = parser.parse_args()
    if unknown := set(options.only) - set(SECTIONS):
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
