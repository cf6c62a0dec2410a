"""A module's name and a class's name mean one thing in the tree: the list of those that do not must not grow.

The listed names are not unique yet. If you make one unique, remove it from the list.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in [ROOT / "core/src", ROOT / "testing/src", *sorted(ROOT.glob("*/*/src"))]
    if folder.parent.name != "_template"  # what is made of it is a part of its own
    for path in sorted(folder.rglob("*.py"))
    if not path.name.endswith("_pb2.py")
]
#: Every part of one shape has these, in its own package: an interface, an entry point, what its authors choose.
SHARED = {"__init__", "__main__", "base", "backend", "frontend", "instance", "plugin", "Parameters"}
MODULES = {
    "metrics",
    "parameters",
    "plugins",
}
CLASSES = set[str]()


def repeated(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1} - SHARED


def test_no_further_module_has_a_name_that_another_has() -> None:
    assert len(SOURCES) > 100
    assert repeated([path.stem for path in SOURCES]) - MODULES == set()


def test_no_further_class_has_a_name_that_another_has() -> None:
    classes = [
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(classes) > 200
    assert repeated(classes) - CLASSES == set()
