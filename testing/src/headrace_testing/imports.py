"""Finds imports of modules that `headrace` does not export."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path


def internal_imports(plugin: str) -> list[str]:
    """Return a line for each import of an internal module in the files of ``plugin``, a package or a module."""
    found = importlib.import_module(plugin).__file__
    assert found is not None
    path = Path(found)
    return [
        f"{file.name} imports {name}"
        for file in (path.parent.rglob("*.py") if path.name == "__init__.py" else [path])
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in _imported(node)
        if re.match(r"headrace(_http|_grpc)?\.|headrace_(http|grpc)$", name)
    ]


def _imported(node: ast.AST) -> list[str]:
    """Return the modules that ``node`` imports; an empty list if it is no import."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.module != "headrace":
        return [f"{node.module}." if node.module.startswith("headrace.") else node.module]
    return []
