"""Reads from a ``model.py``, without running it, if its class can have ``auto_complete_config``."""

from __future__ import annotations

import ast
from pathlib import Path

_METHOD = b"auto_complete_config"
_CLASS = "TritonPythonModel"
#: A longer file is not parsed: the parser needs some hundred times the memory of the text.
_MAX_BYTES = 1 << 20


def may_complete(file: Path) -> bool:
    """Return False if the class in ``file`` cannot have the method: the text has no such name, and the class has no
    base.

    True in all other cases, also for a file that this Python cannot parse: it may be for another version. Does not find
    a method whose name is composed at run time.
    """
    with file.open("rb") as stream:
        text = stream.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES or _METHOD in text:
        return True
    try:
        module = ast.parse(text)
    # SystemError: in CPython 3.11, if another thread parses at the same time (python/cpython#106905).
    except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
        return True
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == _CLASS]
    return len(classes) != 1 or not _inherits_nothing(classes[0]) or sum(map(_may_bind, ast.walk(module))) != 1


def _inherits_nothing(node: ast.ClassDef) -> bool:
    """True for a class without decorators, bases (but ``object``) and metaclass."""
    bases = [base for base in node.bases if not (isinstance(base, ast.Name) and base.id == "object")]
    return not (bases or node.keywords or node.decorator_list)


def _may_bind(node: ast.AST) -> bool:
    """True if ``node`` may bind the name of the class."""
    if isinstance(node, ast.Name):
        return node.id == _CLASS and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.alias):
        return (node.asname or node.name) in (_CLASS, "*")
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == _CLASS
