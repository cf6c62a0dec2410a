"""Imports ``model.py`` in an interpreter that belongs to one model.

Triton's semantics (docs/spec/behaviours.md section 9.1): the module is ``<version>.model``, and the version's
directory and its parent stand at the end of `sys.path`. `headrace_python.isolated_modules` is for an
interpreter that several models share.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace import LoadError
from headrace_python.tracebacks import describe


def load_class(file: Path, version: int, folders: Sequence[Path] = ()) -> type[Any]:
    """The class ``TritonPythonModel`` of ``file``.

    ``folders`` are where its imports are looked for, after everything installed; the file's own
    and its parent unless given. Raises `LoadError` with Triton's words.
    """
    sys.path.extend(str(folder) for folder in folders or (file.parent, file.parent.parent))
    with _no_byte_code():
        return model_class(import_file(str(version), [file.parent], file), version)


def import_file(package: str, path: Sequence[Path], file: Path) -> ModuleType:
    """The module of ``file`` in a new package that looks for its modules in ``path``.

    Raises `LoadError` with what importing raised.
    """
    parent = ModuleType(package)
    parent.__path__ = [str(folder) for folder in path]
    sys.modules[package] = parent
    try:
        return import_module(f"{package}.{file.stem}")
    except BaseException as error:  # the model's code has run: SystemExit is its error, too
        text = describe(error, str(file.parent.parent))
        raise LoadError(text if file.name in text else f"{text} ({file.name})") from error


def model_class(module: ModuleType, version: int) -> type[Any]:
    """``TritonPythonModel`` of ``module``; raises `LoadError` if there is none."""
    found = getattr(module, "TritonPythonModel", None)
    if not isinstance(found, type):
        name = f"{version}.{module.__name__.rpartition('.')[2]}"
        raise LoadError(f"AttributeError: module '{name}' has no attribute 'TritonPythonModel'")
    return found


@contextmanager
def _no_byte_code() -> Iterator[None]:
    """Byte code beside ``model.py`` is found stale only after a second, and a model is reloaded on save."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
