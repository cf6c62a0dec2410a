"""Checks the names in the code of a TorchScript file before PyTorch runs it.

TorchScript is not Python, and its unpickler creates no Python objects: PyTorch refuses a pickle that names
``posix.system`` ("Unknown type name"). But the language has ``torch.save`` and ``torch.from_file``, which write and
read any file, even at load (``__setstate__``), and operators and classes of any loaded library. So a file is loaded
only if its code names none of these. The code is a subset of Python's syntax. Code that Python cannot parse, or that
TorchScript might parse differently, is refused, too.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import Any

#: Operators that access files, or call other processes.
_FILES = frozenset(("save", "from_file", "rpc_async", "rpc_remote", "rpc_sync", "load_tensor"))
#: Libraries of operators, and of classes, which do neither.
_LIBRARIES = frozenset(("aten", "prim", "prims", "quantized", "_quantized", "sparse", "mkldnn", "torchvision"))
#: Characters, and a continued line, which PyTorch never writes.
_UNUSUAL = re.compile(r"[^\n -~]|\\\n")
#: The method that PyTorch calls when it loads a file.
_AT_LOAD = "__setstate__"
_CLASS = re.compile(rb"__torch__\.torch\.classes\.([A-Za-z0-9_]+)")


def reason_for_trust(reader: Any) -> str:
    """Return why the TorchScript archive in ``reader``, a ``PyTorchFileReader``, needs trust; empty if it does not."""
    functions: dict[str, list[ast.FunctionDef]] = {}
    for name in reader.get_all_records():
        if name.startswith("code/") and name.endswith(".py"):
            found = next(_in_code(reader.get_record(name).decode("latin-1"), functions), "")
        elif name.endswith(".pkl"):
            found = next(_in_classes(reader.get_record(name)), "")
        else:
            continue
        if found:
            return f"its '{name}' {found}"
    return _loop_at_load(functions)


def _loop_at_load(functions: Mapping[str, Sequence[ast.FunctionDef]]) -> str:
    """Return the error for a loop that runs at load, in ``__setstate__`` or a function that it calls; else empty.

    PyTorch holds the interpreter's lock meanwhile, so that a loop without an end would stop the whole server.
    """
    waiting, seen = [_AT_LOAD], {_AT_LOAD}
    while waiting:
        for node in (node for function in functions.get(waiting.pop(), ()) for node in ast.walk(function)):
            if isinstance(node, (ast.While, ast.For)):
                return f"its code runs a loop when it is loaded ('{_AT_LOAD}')"
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in functions and name not in seen:
                seen.add(name)
                waiting.append(name)
    return ""


def _in_code(code: str, functions: dict[str, list[ast.FunctionDef]]) -> Iterator[str]:
    """Yield the parts of ``code`` that need trust. Its functions are added to ``functions``, by name."""
    try:
        is_usual = not _UNUSUAL.search(code) and all(map(_is_usual, tokenize.generate_tokens(StringIO(code).readline)))
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        is_usual = False
    if not is_usual:
        yield "is not written as PyTorch writes code"
        return
    yield from _in_classes(code.encode())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Attribute):
            yield from _in_path(ast.unparse(node).split("."), node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1] if len(node.args) > 1 else None
            if not isinstance(name, ast.Constant) or name.value in _FILES:
                yield "gets an attribute by a name that may touch files"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield "imports"


def _is_usual(token: tokenize.TokenInfo) -> bool:
    """False for strings with a prefix, or with quotes other than one double quote."""
    is_string = token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith("FSTRING")
    return not is_string or (token.string.startswith('"') and not token.string.startswith('"""'))


def _in_path(path: list[str], name: str) -> Iterator[str]:
    if path[0] in ("torch", "ops") and name in _FILES:
        yield f"calls '{'.'.join(path)}', which may touch files"
    if path[0] == "ops" and len(path) > 1 and path[1] not in _LIBRARIES:
        yield f"calls operators of the library '{path[1]}'"


def _in_classes(content: bytes) -> Iterator[str]:
    for found in _CLASS.finditer(content):
        library = found[1].decode()
        if library not in _LIBRARIES:
            yield f"names classes of the library '{library}'"
