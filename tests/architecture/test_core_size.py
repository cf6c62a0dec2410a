"""Core proper stays small: what only some deployments use is a plugin, or a package beside it."""

from __future__ import annotations

from pathlib import Path

CORE = Path(__file__).parents[2] / "core/src/headrace"
#: The goal of the design. A feature that passes it moves something out of core proper first.
MAX_LINES = 24_000


def test_core_proper_has_fewer_lines_than_its_limit() -> None:
    written = [path for path in CORE.rglob("*.py") if not path.stem.endswith("_pb2")]
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in written)
    assert len(written) > 100
    assert lines < MAX_LINES
