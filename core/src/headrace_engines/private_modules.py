"""Imports a model's Python files under private names, so that the models of one process share no module.

For two models, ``import helper`` must import the file beside their own ``model.py``, and the new file after a reload.
`sys.modules` has one entry per name, and finders are not called for an existing entry. So neither a path nor a finder
can separate the models. Swapping `sys.modules` during an import works under a lock, but not for imports inside
functions.

So each model has its own package. Its modules get builtins whose ``__import__`` searches that package first. The
interpreter takes ``__import__`` from the globals of the importing code. So this holds for every function of these
modules, on any thread, and costs nothing elsewhere. `importlib.import_module` does not use it.

Byte code is neither read nor written. So a reload never finds stale code, and a model repository stays unchanged.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from types import MappingProxyType, ModuleType
from typing import Any

#: Names that a file beside a model cannot have. The model's files precede other installed packages.
_RESERVED = frozenset((*sys.stdlib_module_names, "numpy", "headrace"))
_numbers = count()


class PrivateModules:
    """The modules of one model, searched in ``folders``, in order. Any thread may import.

    ``reserved`` are further names that a file beside the model cannot have. ``own`` is added to the globals of each
    module.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        reserved: Collection[str] = (),
        own: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        #: The unique name of the package of these modules.
        self.package = f"_headrace_model_{next(_numbers)}"
        self._folders = list(dict.fromkeys(map(str, folders)))
        self._elsewhere = {*_RESERVED, *reserved}
        self._globals: Mapping[str, Any] = {"__builtins__": {**vars(builtins), "__import__": self._import}, **own}

    def load(self, file: Path) -> ModuleType:
        """Return the module of ``file``, which is in the first folder. Raises the exceptions of its code. Call `close`
        also after an exception."""
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        _FINDER.packages[self.package] = self
        parent = ModuleType(self.package)
        parent.__path__ = self._folders
        sys.modules[self.package] = parent
        return import_module(f"{self.package}.{file.stem}")

    def has(self, name: str) -> bool:
        """True if the module ``name`` is one of these."""
        return name.partition(".")[0] == self.package

    def loaded(self) -> Iterator[ModuleType]:
        """Return all modules imported so far, with their package."""
        return (sys.modules[name] for name in tuple(sys.modules) if self.has(name))

    def close(self) -> None:
        """Remove the modules. Code that still runs keeps them, and cannot import further ones."""
        _FINDER.packages.pop(self.package, None)
        for name in [name for name in tuple(sys.modules) if self.has(name)]:
            del sys.modules[name]

    def prepare(self, module: ModuleType) -> None:
        """Add the globals that the code of ``module`` needs."""
        vars(module).update(self._globals)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """``__import__`` for the model's own modules."""
        top = name.partition(".")[0]
        if level == 0 and top not in self._elsewhere:
            if self._is_beside(top):
                return self._import_own(name, fromlist)
            try:
                found = builtins.__import__(name, globals, locals, fromlist or (), level)
            except ModuleNotFoundError as error:
                if error.name == top and self._is_beside(top, only_folder=True):
                    return self._import_own(name, fromlist)
                raise
            self._elsewhere.add(top)
            return found
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    def _is_beside(self, top: str, only_folder: bool = False) -> bool:
        """True if a module or package is beside the model.

        With ``only_folder``, a folder without ``__init__`` counts, too; else it may be data.
        """
        name = f"{self.package}.{top}"
        if name in sys.modules:
            return True
        spec = _find(name, self._folders)
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


class _UncachedSource(SourceFileLoader):
    """Compiles the source each time."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError  # no byte code is read or written

    def exec_module(self, module: ModuleType) -> None:
        _FINDER.packages[module.__name__.partition(".")[0]].prepare(module)
        super().exec_module(module)


class _PrivateFinder(MetaPathFinder):
    """Finds the modules of all models, each under its own package."""

    def __init__(self) -> None:
        self.packages: dict[str, PrivateModules] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is None or name.partition(".")[0] not in self.packages:
            return None
        return _find(name, path)


def _find(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return the module or package ``name`` in ``path``; else a namespace package of its folders, without loader."""
    loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_UncachedSource, SOURCE_SUFFIXES)
    folders: list[str] = []
    for entry in path:
        spec = FileFinder(entry, *loaders).find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        folders += (spec and spec.submodule_search_locations) or []
    if not folders:
        return None
    found = ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = folders
    return found


_FINDER = _PrivateFinder()
