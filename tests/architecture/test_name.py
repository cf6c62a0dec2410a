"""The project's first name belongs to another project: it appears nowhere here."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORMER = "pen" + "stock"


def test_the_former_name_appears_nowhere() -> None:
    found = subprocess.run(["git", "grep", "-ail", FORMER], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.stdout.split() == []
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not [path for path in files.stdout.splitlines() if FORMER in path.lower()]
