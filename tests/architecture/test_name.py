"""The project's first name belongs to another project: nothing here may be found, installed or imported under it."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORMER = "pen" + "stock"
#: The one line that tells users what the name was.
TOLD = "core/changelog.d/5.removal.01.md"


def test_the_former_name_stands_in_one_line_of_the_changelog() -> None:
    found = subprocess.run(["git", "grep", "-ail", FORMER], cwd=ROOT, capture_output=True, text=True, check=False)
    assert set(found.stdout.split()) <= {TOLD, "core/CHANGELOG.md"}
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not [path for path in files.stdout.splitlines() if FORMER in path.lower()]
