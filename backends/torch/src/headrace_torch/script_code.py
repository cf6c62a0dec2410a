"""What the code in a TorchScript file may name, read before PyTorch runs any of it.

TorchScript is a language of its own, and its unpickler makes nothing of Python's: a pickle that names ``posix.system``
is refused by PyTorch ("Unknown type name"). But the language has ``torch.save`` and ``torch.from_file``, which write
and read any file, at load already (``__setstate__``), and operators and classes of whatever library is loaded. So a
file is loaded only if its code names neither. Code is a subset of Python's syntax; what Python cannot parse,
or what the two might read differently, is refused as well.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from typing import Any

#: Operators that touch files, or call other processes.
_FILES = frozenset(("save", "from_file", "rpc_async", "rpc_remote", "rpc_sync", "load_tensor"))
#: Libraries of operators, and of classes, which are known to touch none.
_LIBRARIES = frozenset(("aten", "prim", "prims", "quantized", "_quantized", "sparse", "mkldnn", "torchvision"))
#: Characters, and a continued line, which PyTorch never writes.
_UNUSUAL = re.compile(r"[^\n -~]|\\\n")
_CLASS = re.compile(rb"__torch__\.torch\.classes\.([A-Za-z0-9_]+)")


def finding(reader: Any) -> str:
    """Why the TorchScript archive in ``reader``, a ``PyTorchFileReader``, needs trust; empty if it does not."""
    for name in reader.get_all_records():
        if name.startswith("code/") and name.endswith(".py"):
            found = next(_in_code(reader.get_record(name).decode("latin-1")), "")
        elif name.endswith(".pkl"):
            found = next(_in_classes(reader.get_record(name)), "")
        else:
            continue
        if found:
            return f"its '{name}' {found}"
    return ""


def _in_code(code: str) -> Iterator[str]:
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
        if isinstance(node, ast.Attribute):
            yield from _in_path(ast.unparse(node).split("."), node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1] if len(node.args) > 1 else None
            if not isinstance(name, ast.Constant) or name.value in _FILES:
                yield "gets an attribute by a name that may touch files"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield "imports"


def _is_usual(token: tokenize.TokenInfo) -> bool:
    """False for strings with a prefix, with other quotes, or with three."""
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
