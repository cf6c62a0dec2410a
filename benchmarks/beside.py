"""Runs a script with the sources of this commit and of another one, alternately, each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def least(script: str, words: Sequence[str], turns: int, sources: Path | None) -> tuple[dict[str, float], ...]:
    """Return the minimum of each figure that ``script --json`` prints, with ``sources`` (empty without them), and with
    this commit."""
    theirs, ours = dict[str, float](), dict[str, float]()
    for _ in range(turns if sources else 1):
        for found, path in ((theirs, sources), (ours, None)):
            if found is ours or path:
                for name, figure in _figures(script, words, path).items():
                    found[name] = min(found.get(name, figure), figure)
    return theirs, ours


def _figures(script: str, words: Sequence[str], sources: Path | None) -> dict[str, float]:
    environment = os.environ | ({"PYTHONPATH": str(sources)} if sources else {})
    command = [sys.executable, script, "--json", *words]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(found.stdout)  # type: ignore[no-any-return]
