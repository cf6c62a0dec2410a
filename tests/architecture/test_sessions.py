"""Every test is run by a session of noxfile.py."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Extras of core that its session installs, and the library of GPUs, whose tests need one.
HERE = {"blake3", "pynvml"}


def test_what_tests_leaves_out_is_there() -> None:
    """An ignored path that does not exist would mean that a move has had its tests run twice, or not at all."""
    text = (ROOT / "noxfile.py").read_text()
    (without_plugins,), (from_wheels,) = (
        re.findall(rf"^{name} = \((.*)\)$", text, re.MULTILINE) for name in ("WITHOUT_PLUGINS", "FROM_WHEELS")
    )
    paths = re.findall(r'"(.*?)"', without_plugins + from_wheels)
    assert len(paths) == 5
    assert all((ROOT / path).exists() for path in paths)


def test_no_test_of_core_is_skipped_for_want_of_a_plugin() -> None:
    """The session `core` has none, and no other session of the default run has these tests."""
    texts = [path.read_text() for folder in ("core", "testing") for path in (ROOT / "tests" / folder).rglob("*.py")]
    assert len(texts) > 100
    wanted = {name for text in texts for name in re.findall(r'importorskip\("(\w+)', text)}
    assert wanted <= HERE
