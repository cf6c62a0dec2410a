"""The scheduler that the docs write, as a stranger installs it: it passes the kit, and serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.testing.example import write_model
from headrace.testing.serving import WAYS, Way, infer, serve

PAGE = (Path(__file__).parents[2] / "docs/write-a-scheduler.md").read_text()
MODULE, TEST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(PROJECT,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
(CONFIG,) = re.findall(r"```\n(name: .*?)```", PAGE, re.DOTALL)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's module with the page's entry point, on the path. Returns the folder of its test."""
    (entry_point,) = re.findall(r"^\[project.entry-points.headrace\]\n(.*)$", PROJECT, re.MULTILINE)
    (name,) = re.findall(r'^name = "(.*)"$', PROJECT, re.MULTILINE)
    site = tmp_path / "site"
    info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[headrace]\n" + entry_point.replace('"', "") + "\n")
    (site / "headrace_shortest_scheduler.py").write_text(MODULE)
    (tmp_path / "test_shortest.py").write_text(TEST)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "headrace_shortest_scheduler", raising=False)
    return tmp_path


def test_it_passes_the_kit(installed: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shortest.py"]
    done = subprocess.run(
        command, cwd=installed, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # It claims no order of answers, timeouts, postponement, priorities, other instances; and four are about calls of
    # other models.
    assert re.search(r"^1[0-9] passed, 9 skipped", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("over", WAYS)
def test_a_model_that_chooses_it_is_served(over: Way, installed: Path) -> None:
    write_model(installed / "models", CONFIG)
    x = np.arange(3, dtype=np.float32).reshape(3, 1)
    with serve(installed / "models", listen=True) as server:
        np.testing.assert_array_equal(np.asarray(infer(server, "echo", {"x": x}, over)["y"]), x)
        scheduler = server.served("echo")[0].scheduler.scheduler
        assert type(scheduler).__module__ == "headrace_shortest_scheduler"
        assert scheduler.context.parameters.patience_us == 50_000


def test_its_code_is_about_forty_lines_from_the_outside() -> None:
    imported = re.findall(r"^(?:from|import) (\S+)", MODULE, re.MULTILINE)
    assert {name for name in imported if name.startswith("headrace")} == {"headrace"}
    assert sum(bool(line.strip()) for line in MODULE.splitlines()) <= 45
