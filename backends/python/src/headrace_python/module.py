"""Finds ``model.py``, and imports it in an interpreter that belongs to one model or in one that several share.

It is in the version's directory, or in that of the backend (docs/spec/behaviours.md sections 9.1 and 10.7).

`load_class` is for the former, with Triton's semantics (docs/spec/behaviours.md section 9.1): the module is
``<version>.model``, and the version's directory and its parent stand at the end of `sys.path`.

`IsolatedModules` is for the latter: the modules of one instance, kept to itself.
Two models may both say ``import helper`` and mean the file beside their own ``model.py``, and after
a reload they mean the new one. `sys.modules` has one place for the name, and a finder is not asked
once that place is taken, so neither a path nor a finder can tell them apart. To swap `sys.modules`
while a model imports would, under a lock, but not for an import inside ``execute`` on any thread.

So each instance gets a package of its own name, and its modules are given builtins whose
``__import__`` looks for ``helper`` in that package first. The interpreter takes ``__import__`` from the
globals of the code that imports, so this holds for every function of these modules, on whatever
thread, for ever; and costs nothing elsewhere. `importlib.import_module` does not pass there.
"""

from __future__ import annotations

import builtins
import json
import logging
import posixpath
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace import LoadError, why_path_leaves
from headrace_python.outcomes import describe
from triton_python_backend_utils.runtime import MODULE_KEY, Runtime

log = logging.getLogger("headrace.python")

#: The setting, as in Triton, that says where the directories of python-based backends are.
BACKENDS = "backend-directory"
RUNTIME = "model.py"


@dataclass(frozen=True, slots=True)
class Source:
    """``file`` has the class; ``folders`` are where its imports are looked for, the usual ones if empty."""

    file: Path
    folders: Sequence[Path] = ()


def find_source(path: Path, config: str, options: Mapping[str, str]) -> Source:
    """The code for the version in ``path``, by the model's config as JSON and its backend's settings.

    Raises `LoadError` if there is none, and says so in the log as Triton does.
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
    """``default_model_filename`` in the version's directory ``path``, or ``model.py``.

    Raises `LoadError` if there is none, or if it is no Python file of the model's directory.
    """
    name = json.loads(config).get("default_model_filename") or "model.py"
    file = path / posixpath.normpath(name)  # not through a link and up again
    if not name.endswith(".py"):
        raise LoadError(f"Model name must end with '.py'. Model name is \"{name}\".")
    if not file.is_file():
        raise LoadError(f"Python model file not found in '{file}'")
    if reason := why_path_leaves(name, levels=1):
        raise LoadError(f"Python model file '{name}' is outside the model directory: {reason}")
    return file


def load_class(file: Path, version: int, folders: Sequence[Path] = ()) -> type[Any]:
    """The class ``TritonPythonModel`` of ``file``.

    ``folders`` are where its imports are looked for, after everything installed; the file's own
    and its parent unless given. Raises `LoadError` with Triton's words. The process is the model's: it writes no byte
    code from here on, whenever the model imports. Beside ``model.py`` that would be found stale only after a second,
    and a model is reloaded on save.
    """
    sys.path.extend(str(folder) for folder in folders or (file.parent, file.parent.parent))
    sys.dont_write_bytecode = True
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


#: Names that a file beside a model cannot take; installed packages otherwise come second.
_RESERVED = frozenset((*sys.stdlib_module_names, "numpy", "headrace", "triton_python_backend_utils"))

_numbers = count()


class IsolatedModules:
    """What ``file`` and the modules beside it become for one instance.

    ``folders`` are where its imports are looked for; the file's own and its parent unless given.
    """

    def __init__(self, file: Path, runtime: Runtime, folders: Sequence[Path] = ()) -> None:
        self.package = f"_headrace_model_{next(_numbers)}"
        self._file = file
        self._folders = tuple(folders) or (file.parent, file.parent.parent)
        self._elsewhere = set(_RESERVED)
        self._globals: Mapping[str, Any] = {
            "__builtins__": {**vars(builtins), "__import__": self._import},
            MODULE_KEY: runtime,
        }

    def load_class(self, version: int) -> type[Any]:
        """The class ``TritonPythonModel``. Raises `LoadError` with Triton's words; then nothing is left."""
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        _FINDER.packages[self.package] = self
        try:
            return model_class(import_file(self.package, self._folders, self._file), version)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Forget the modules. Code that still runs keeps them, and can import no more of them."""
        _FINDER.packages.pop(self.package, None)
        for name in [name for name in tuple(sys.modules) if name.partition(".")[0] == self.package]:
            del sys.modules[name]

    def prepare(self, module: ModuleType) -> None:
        """Give ``module`` what its code is to find when it runs."""
        vars(module).update(self._globals)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """``__import__`` as the model's own modules see it."""
        top = name.partition(".")[0]
        if level == 0 and top not in self._elsewhere:
            if self._has(top):
                return self._import_own(name, fromlist)
            try:
                found = builtins.__import__(name, globals, locals, fromlist or (), level)
            except ModuleNotFoundError as error:
                if error.name == top and self._has(top, only_folder=True):
                    return self._import_own(name, fromlist)
                raise
            self._elsewhere.add(top)
            return found
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    def _has(self, top: str, only_folder: bool = False) -> bool:
        """Whether a module or package lies beside the model; ``only_folder``: a folder without ``__init__``
        will do, which else may as well hold data."""
        name = f"{self.package}.{top}"
        if name in sys.modules:
            return True
        spec = _find(name, [str(folder) for folder in self._folders])
        return spec is not None and (spec.loader is not None or only_folder)

    def _import_own(self, name: str, fromlist: Sequence[str] | None) -> ModuleType:
        full = f"{self.package}.{name}"
        try:
            if fromlist:
                return builtins.__import__(full, None, None, fromlist, 0)
            import_module(full)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith(f"{self.package}."):
                error.name = str(error.name).removeprefix(f"{self.package}.")
                error.msg = f"No module named {error.name!r}"
            raise
        return sys.modules[f"{self.package}.{name.partition('.')[0]}"]


class _Source(SourceFileLoader):
    """Compiles the source each time: what is loaded after a reload is never stale, and nothing is
    written into a model repository."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError  # says that there is no byte code, neither to read nor to write

    def exec_module(self, module: ModuleType) -> None:
        _FINDER.packages[module.__name__.partition(".")[0]].prepare(module)
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the modules of all instances, each under its own package."""

    def __init__(self) -> None:
        self.packages: dict[str, IsolatedModules] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.packages or path is None:
            return None
        return _find(name, path)


def _find(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """The module or the package ``name`` in ``path``; else a package of its folders there, without loader."""
    folders: list[str] = []
    for entry in path:
        spec = FileFinder(entry, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_Source, SOURCE_SUFFIXES)).find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        folders += (spec and spec.submodule_search_locations) or []
    if not folders:
        return None
    found = ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = folders
    return found


_FINDER = _Finder()
