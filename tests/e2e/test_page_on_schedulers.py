"""The scheduler that the docs write, as a stranger installs it: it passes the kit, and serves."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace_testing.example import write_model
from headrace_testing.serving import WAYS, Way, infer, serve
from tests.e2e.conftest import run_kit

PAGE = (Path(__file__).parents[2] / "docs/write-a-scheduler.md").read_text()
(MODULE, _) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(CONFIG,) = re.findall(r"```\n(name: .*?)```", PAGE, re.DOTALL)


@pytest.fixture
def installed(install_page: Callable[[str], Path]) -> Path:
    """The folder of its test."""
    return install_page(PAGE)


def test_it_passes_the_kit(installed: Path) -> None:
    # It has no metrics, and claims no order of answers, timeouts, postponement, priorities, other instances, requests
    # that run again, mistakes in its config. Four are about calls of other models.
    output = run_kit(installed)
    assert re.search(r"^1[0-9] passed, 12 skipped", output, re.MULTILINE), output


@pytest.mark.parametrize("over", WAYS)
def test_a_model_that_chooses_it_is_served(over: Way, installed: Path) -> None:
    write_model(installed / "models", CONFIG)
    x = np.arange(3, dtype=np.float32).reshape(3, 1)
    with serve(installed / "models", listen=True) as server:
        np.testing.assert_array_equal(np.asarray(infer(server, "echo", {"x": x}, over)["y"]), x)
        scheduler = server.served("echo")[0].model_queue.scheduler
        assert type(scheduler).__module__ == "headrace_shortest_scheduler"
        assert scheduler.context.parameters.patience_us == 50_000


def test_its_code_is_about_forty_lines_from_the_outside() -> None:
    imported = re.findall(r"^(?:from|import) (\S+)", MODULE, re.MULTILINE)
    assert {name for name in imported if name.startswith("headrace")} == {"headrace"}
    assert sum(bool(line.strip()) for line in MODULE.splitlines()) <= 45
