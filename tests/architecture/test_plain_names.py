"""Names of variables and functions are nouns and verbs of the field. These words name anything, so they name
nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
VAGUE = {"told", "said", "gone", "hear", "meet"}


def names(source: str) -> Iterator[str]:
    """Yield the names that ``source`` defines, without leading and trailing underscores."""
    for node in ast.walk(ast.parse(source)):
        name = ""
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        yield name.strip("_").lower()


def test_no_source_has_a_vague_name() -> None:
    sources = [path for folder in ("core", "testing", "*/*") for path in ROOT.glob(f"{folder}/src/**/*.py")]
    assert len(sources) > 500
    words = {path: VAGUE.intersection(names(path.read_text(encoding="utf-8"))) for path in sources}
    assert {str(path.relative_to(ROOT)): found for path, found in words.items() if found} == {}


def test_vague_names_are_found() -> None:
    source = "class Gone: ...\ndef _hear(said): self._told = 1\nmeet = 2\n"
    assert VAGUE.issubset(names(source))
