"""The engine of `echo_engine.py` as a third party's plugin, and models of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ENGINE = (Path(__file__).parent / "echo_engine.py").read_text()
_CONFIG = 'backend: "echo" parameters { key: "isolation" value { string_value: "%s" } }'


def _install(site: Path, old: str = "", new: str = "") -> Path:
    """Install the plugin in ``site``, with the repository ``models`` of ``thread`` and ``process``. Return ``site``.

    ``old`` in its code is replaced by ``new``.
    """
    assert old in ENGINE
    (site / "echo_engine.py").write_text(ENGINE.replace(old, new) if old else ENGINE)
    information = site / "headrace_echo-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-echo\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[headrace]\necho = echo_engine\n")
    for isolation in ("thread", "process"):
        (site / "models" / isolation / "1").mkdir(parents=True)
        (site / "models" / isolation / "config.pbtxt").write_text(_CONFIG % isolation)
    return site


@pytest.fixture(scope="session")
def install_echo() -> Callable[..., Path]:
    return _install


@pytest.fixture(scope="session")
def echo_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _install(tmp_path_factory.mktemp("echo"))
