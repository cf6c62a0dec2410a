"""The response cache that the docs write, as a stranger installs it: it passes the kit, and another has its answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace import CachedResponse, ResponseCache
from headrace.plugins import Plugins
from tests.e2e.conftest import run_kit

PAGE = (Path(__file__).parents[2] / "docs/write-a-cache.md").read_text()


@pytest.fixture
def installed(install_page: Callable[[str], Path]) -> Path:
    return install_page(PAGE)


def test_it_passes_the_kit(installed: Path) -> None:
    output = run_kit(installed)
    assert re.search(r"^[0-9]+ passed in", output, re.MULTILINE), output


def test_it_has_no_more_answers_than_it_may(installed: Path) -> None:
    made = _made(installed, most="3")
    for number in range(5):
        made.put(bytes([number]) * 32, CachedResponse({"y": np.full(2, number)}, {}))
    entries = [made.get(bytes([number]) * 32) for number in range(5)]
    assert [answer is not None for answer in entries] == [False, False, True, True, True]
    again = _made(installed, most="3")
    assert again.get(bytes([4]) * 32) is not None
    again.put(bytes([9]) * 32, CachedResponse({"y": np.zeros(2)}, {}))
    assert len(list((installed / "kept").iterdir())) == 3
    assert again.measure() == {"headrace_shelf_answers": 3}


def _made(installed: Path, **settings: str) -> ResponseCache:
    kind = Plugins.discover(("shelf",)).caches.get("shelf")
    return kind(kind.Parameters(path=str(installed / "kept"), most=int(settings["most"])))
