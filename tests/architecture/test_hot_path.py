"""From a decoded request to its answer, no hook, no regular expression, no reflection, no uuid."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "core/src"
FOLDERS = ("headrace/messages", "headrace/schedulers", "headrace/executors", "headrace_processes")
PATH = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if path.parent != ROOT / "headrace_processes/supervision"
)
#: Once per life of a child process, or for settings that few requests have.
RARE = {
    ROOT / f"{name}.py"
    for name in (
        "headrace_processes/ipc/json_parts",
        "headrace_processes/config_completion",
        "headrace_processes/handshake",
        "headrace_processes/launch",
        "headrace_processes/process_kind",
    )
}
SLOW = {"copy", "inspect", "json", "pluggy", "re", "uuid"}


def slow_imports(source: str) -> set[str]:
    """The modules of `SLOW` that ``source`` imports."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return SLOW & (plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)})


@pytest.mark.parametrize(
    "path", [path for path in PATH if path not in RARE], ids=lambda path: str(path.relative_to(ROOT))
)
def test_the_module_imports_nothing_slow(path: Path) -> None:
    assert slow_imports(path.read_text()) == set()


def test_a_slow_import_is_found() -> None:
    assert slow_imports("import re\nfrom uuid import uuid4\nfrom os import path") == {"re", "uuid"}
