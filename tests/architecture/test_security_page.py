"""The table of the security page that names a test for each class of fault."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
(PAGE,) = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/spec").glob("security*")]
#: What requests over the network can cause, and files that repository agents and storages read.
WANTED = {
    "C1",
    "C2",
    "C3",
    "C5",
    "C6",
    "C8",
    *(f"C{n}" for n in range(10, 16)),
    "C18",
    "C20",
    "C21",
    "C23",
    "C24",
    "C26",
    "C27",
    "C28",
    "C30",
    "C31",
}


def rows() -> dict[str, list[str]]:
    """The tests of each class."""
    table = PAGE.partition("## Where the classes of the protocols are tested")[2]
    return {name: re.findall(r"`([^`]+)`", tests) for name, tests in re.findall(r"^\| (C\d+) \| (.+) \|$", table, re.M)}


def test_each_class_has_a_test() -> None:
    assert rows().keys() == WANTED
    assert all(rows().values())


@pytest.mark.parametrize("test", sorted({test for tests in rows().values() for test in tests}))
def test_the_test_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert not name or name in functions
