"""Finds and imports ``model.py``, in the version's directory or the backend's.

Source: docs/spec/behaviours.md sections 9.1 and 10.7.

- `load_class` is for an interpreter of one model, with Triton's semantics: the module is ``<version>.model``, and the
  version's directory and its parent are at the end of `sys.path`.
- `IsolatedModules` is for an interpreter that several models share: each instance has its own modules.
"""

from __future__ import annotations

import json
import logging
import posixpath
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace import LoadError, why_path_leaves
from headrace_engines import PrivateModules
from headrace_python.outcomes import describe
from triton_python_backend_utils.runtime import MODULE_KEY, Runtime

log = logging.getLogger("headrace.python")

#: The setting, as in Triton, with the directory that holds the python-based backends.
BACKENDS = "backend-directory"
RUNTIME = "model.py"


@dataclass(frozen=True, slots=True)
class Source:
    """``file`` has the class. Its imports are searched in ``folders``; if empty, in its directory and the parent."""

    file: Path
    folders: Sequence[Path] = ()


def find_source(path: Path, config: str, options: Mapping[str, str]) -> Source:
    """Return the code for the version in ``path``, by the model's config as JSON and its backend's settings.

    Raises `LoadError` if there is none, and logs Triton's line about it.
    """
    try:
        return _found(path, config, options)
    except LoadError as error:
        log.error("Failed to preinitialize Python stub: %s", error)
        raise


def _found(path: Path, config: str, options: Mapping[str, str]) -> Source:
    settings = json.loads(config)
    name = settings.get("backend") or "python"
    if name == "python" or BACKENDS not in options:
        return Source(model_file(path, config))
    folder = Path(options[BACKENDS], name)
    file = folder / (settings.get("runtime") or RUNTIME)
    if file.suffix != ".py" or file.parent != folder or not file.is_file():
        raise LoadError(f"Python model file not found in '{file}'")
    return Source(file, (folder, path, path.parent))


def model_file(path: Path, config: str) -> Path:
    """Return ``default_model_filename`` in the version's directory ``path``, or ``model.py``.

    Raises `LoadError` if there is none, or if it is no Python file of the model's directory.
    """
    name = json.loads(config).get("default_model_filename") or "model.py"
    file = path / posixpath.normpath(name)  # not through a link and up again
    if not name.endswith(".py"):
        raise LoadError(f"Model name must end with '.py'. Model name is \"{name}\".")
    if not file.is_file():
        raise LoadError(f"Python model file not found in '{file}'{_beside(path)}")
    if reason := why_path_leaves(name, levels=1):
        raise LoadError(f"Python model file '{name}' is outside the model directory: {reason}")
    return file


def _beside(folder: Path) -> str:
    """Return a hint if the model's file is missing and ``folder`` has exactly one Python file; else empty."""
    found = [file.name for file in folder.glob("*.py") if file.name.isprintable()]
    if len(found) != 1:
        return ""
    return f". Its directory has '{found[0]}': rename it, or set default_model_filename: \"{found[0]}\""


def load_class(file: Path, version: int, folders: Sequence[Path] = ()) -> type[Any]:
    """Return the class ``TritonPythonModel`` of ``file``. Raises `LoadError` with Triton's words.

    Its imports are searched in ``folders``, after everything installed; if empty, in the file's directory and the
    parent. From here on, the process writes no byte code: Python compares times in seconds, and a model may be reloaded
    on save.
    """
    sys.path.extend(str(folder) for folder in folders or (file.parent, file.parent.parent))
    sys.dont_write_bytecode = True
    return model_class(_import_file(str(version), file), version)


def _import_file(package: str, file: Path) -> ModuleType:
    """Return the module of ``file`` in a new package. Raises `LoadError` with the exception of the import."""
    parent = ModuleType(package)
    parent.__path__ = [str(file.parent)]
    sys.modules[package] = parent
    with _loading(file):
        return import_module(f"{package}.{file.stem}")


@contextmanager
def _loading(file: Path) -> Iterator[None]:
    """Turn an exception of the import of ``file`` into a `LoadError`."""
    try:
        yield
    except BaseException as error:  # the model's code has run: SystemExit is its error, too
        text = describe(error, str(file.parent.parent))
        raise LoadError(text if file.name in text else f"{text} ({file.name})") from error


def model_class(module: ModuleType, version: int) -> type[Any]:
    """Return ``TritonPythonModel`` of ``module``; raises `LoadError` if there is none."""
    found = getattr(module, "TritonPythonModel", None)
    if not isinstance(found, type):
        name = f"{version}.{module.__name__.rpartition('.')[2]}"
        reason = f"AttributeError: module '{name}' has no attribute 'TritonPythonModel'"
        if "torch" in vars(module):
            reason += '; a torch.nn.Module is served by: backend: "pytorch" runtime: "model.py"'
        raise LoadError(reason)
    return found


class IsolatedModules(PrivateModules):
    """The modules of ``file`` and of the files beside it, for one instance.

    Imports are searched in ``folders``; by default, the file's own and its parent.
    """

    def __init__(self, file: Path, runtime: Runtime, folders: Sequence[Path] = ()) -> None:
        folders = folders or (file.parent, file.parent.parent)
        super().__init__(folders, {"triton_python_backend_utils"}, {MODULE_KEY: runtime})
        self._file = file

    def load_class(self, version: int) -> type[Any]:
        """Return the class ``TritonPythonModel``. Raises `LoadError` with Triton's words and removes its modules."""
        try:
            with _loading(self._file):
                module = self.load(self._file)
            return model_class(module, version)
        except BaseException:
            self.close()
            raise
