"""Imports a model's Python files under names of their own, so that models of one process share no module.

Two models may both say ``import layers`` and mean the file beside their own ``model.py``, and after a reload they mean
the new one, while `sys.modules` has one place for a name. So the files of each model that is loaded are modules of a
package with a name that nothing else has, and get builtins whose ``__import__`` looks there first; the interpreter
takes ``__import__`` from the globals of the code that imports, on whatever thread, for ever. What is installed, and
Python's own, comes second or, for the latter, first. Byte code is neither read nor written.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from itertools import count
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

#: What a file beside a model cannot stand in for.
_RESERVED = frozenset((*sys.stdlib_module_names, "headrace", "numpy", "torch"))
_numbers = count()


class PrivateModules:
    """The modules of one model, found in ``folders``, in that order. Any thread may import."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.package = f"_headrace_torch_model_{next(_numbers)}"
        self._builtins: Mapping[str, Any] = {**vars(builtins), "__import__": self._import}
        parent = ModuleType(self.package)
        parent.__path__ = list(dict.fromkeys(map(str, folders)))
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        _FINDER.packages[self.package] = self
        sys.modules[self.package] = parent
        self._path = parent.__path__

    def load(self, file: Path) -> ModuleType:
        """The module of ``file``, which lies in the first of the folders. Raises what its code raises."""
        return import_module(f"{self.package}.{file.stem}")

    def has(self, module: str) -> bool:
        """Whether the module of this name is one of these."""
        return module.partition(".")[0] == self.package

    def functions(self) -> Iterator[FunctionType]:
        """Every function and method that the modules define under a name."""
        for name in [name for name in tuple(sys.modules) if self.has(name)]:
            named = list(vars(sys.modules[name]).values())
            classes = [each for each in named if isinstance(each, type) and each.__module__ == name]
            for each in [*named, *(member for kind in classes for member in vars(kind).values())]:
                if isinstance(each, FunctionType):
                    yield each

    def close(self) -> None:
        """Forget the modules. Code that still runs keeps them, and can import no more of them."""
        _FINDER.packages.pop(self.package, None)
        for name in [name for name in tuple(sys.modules) if self.has(name)]:
            del sys.modules[name]

    def prepare(self, module: ModuleType) -> None:
        """Give ``module`` what its code is to find when it runs."""
        vars(module)["__builtins__"] = self._builtins

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
        if level or top in _RESERVED or not self._is_beside(top):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        full = f"{self.package}.{name}"
        try:
            import_module(full)
        except ModuleNotFoundError as error:
            if self.has(error.name or ""):
                error.name = str(error.name).removeprefix(f"{self.package}.")
                error.msg = f"No module named {error.name!r}"
            raise
        if fromlist:
            return builtins.__import__(full, None, None, fromlist, 0)
        return sys.modules[f"{self.package}.{top}"]

    def _is_beside(self, top: str) -> bool:
        """Whether a module or a package of this name lies beside the model."""
        full = f"{self.package}.{top}"
        return full in sys.modules or _find(full, self._path) is not None


class _UncachedSource(SourceFileLoader):
    """Compiles the source each time: what a reload finds is never stale, and nothing is written into a repository."""

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
    """The module or package ``name``; a folder without ``__init__`` is none, it may as well hold data."""
    for folder in path:
        spec = FileFinder(folder, (_UncachedSource, SOURCE_SUFFIXES)).find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
    return None


_FINDER = _PrivateFinder()
