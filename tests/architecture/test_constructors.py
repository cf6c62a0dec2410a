"""A constructor that takes more than eight things does more than one: what belongs together is one thing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "core/src"
MOST = 8


def constructors(source: str) -> dict[str, int]:
    """The parameters of each constructor that is written out, by its class. A record has fields instead."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    found[node.name] = len(each.args.args) - 1 + len(each.args.kwonlyargs)
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_constructors_take_at_most_eight_parameters(path: Path) -> None:
    assert {name: count for name, count in constructors(path.read_text()).items() if count > MOST} == {}


def test_a_ninth_parameter_is_found() -> None:
    assert constructors("class A:\n    def __init__(self, a, b, c, d, e, f, g, h, *, i): ...") == {"A": 9}
