"""Imports a model's Python files under names of their own, so that the models of one process share no module.

Two models may both say ``import helper`` and mean the file beside their own ``model.py``, and after a reload they mean
the new one. `sys.modules` has one place for the name, and a finder is not asked once that place is taken, so neither a
path nor a finder can tell them apart. To swap `sys.modules` while a model imports would, under a lock, but not for an
import inside a function on any thread.

So each gets a package of its own name, and its modules are given builtins whose ``__import__`` looks for ``helper`` in
that package first. The interpreter takes ``__import__`` from the globals of the code that imports, so this holds for
every function of these modules, on whatever thread, for ever; and costs nothing elsewhere. `importlib.import_module`
does not pass there. Byte code is neither read nor written: what a reload finds is never stale, and a model repository
stays as it is.
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

#: What a file beside a model cannot stand in for. Installed packages otherwise come second.
_RESERVED = frozenset((*sys.stdlib_module_names, "numpy", "headrace"))
_numbers = count()


class PrivateModules:
    """The modules of one model, found in ``folders``, in that order. Any thread may import.

    ``reserved`` are further names that no file beside the model can take; ``own`` is in the globals of each module from
    the beginning.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        reserved: Collection[str] = (),
        own: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        #: Of which all these modules are; no other model's has the name.
        self.package = f"_headrace_model_{next(_numbers)}"
        self._folders = list(dict.fromkeys(map(str, folders)))
        self._elsewhere = {*_RESERVED, *reserved}
        self._globals: Mapping[str, Any] = {"__builtins__": {**vars(builtins), "__import__": self._import}, **own}

    def load(self, file: Path) -> ModuleType:
        """The module of ``file``, which lies in the first of the folders. Raises what its code raises; `close` has
        then to be called all the same."""
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        _FINDER.packages[self.package] = self
        parent = ModuleType(self.package)
        parent.__path__ = self._folders
        sys.modules[self.package] = parent
        return import_module(f"{self.package}.{file.stem}")

    def has(self, name: str) -> bool:
        """Whether the module called ``name`` is one of these."""
        return name.partition(".")[0] == self.package

    def loaded(self) -> Iterator[ModuleType]:
        """All that have been imported so far, their package among them."""
        return (sys.modules[name] for name in tuple(sys.modules) if self.has(name))

    def close(self) -> None:
        """Forget the modules. Code that still runs keeps them, and can import no more of them."""
        _FINDER.packages.pop(self.package, None)
        for name in [name for name in tuple(sys.modules) if self.has(name)]:
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
        """Whether a module or package lies beside the model; ``only_folder``: a folder without ``__init__``
        will do, which else may as well hold data."""
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
        raise OSError  # says that there is no byte code, neither to read nor to write

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
    """The module or the package ``name`` in ``path``; else a package of its folders there, without loader."""
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
