"""docs/python-models.md: its files do what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "python-models.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page; each block stands below the line with its name."""
    for name, text in re.findall(
        r"^`([\w/.]+)`[^\n]*:\n\n```\w*\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_pages_test_passes_on_the_pages_model(folder: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV_"))}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_scale.py"]
    run = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environ, timeout=100)
    assert "2 passed" in run.stdout, run.stdout
