"""Finds plugins, fills the registries, and explains what is broken.

One `Plugins` per server; there is no global manager. A plugin that cannot be imported, or whose
hooks do not match, is kept with the reason: it stops nobody but the model that needs it, which
fails to load with that same reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points, version
from types import ModuleType
from typing import Any, Generic, TypeVar

import pluggy

from penstock import builtins, hookspecs
from penstock.backends.base import Backend
from penstock.errors import LoadError
from penstock.frontends.base import Frontend
from penstock.schedulers.base import Scheduler

GROUP = "penstock"


P = TypeVar("P", bound=type)


@dataclass(slots=True)
class PluginInfo:
    """One plugin: where it comes from, which parts it brings, and why it is broken, if it is."""

    name: str
    distribution: str
    version: str
    parts: list[str] = field(default_factory=list)
    error: str | None = None

    def __str__(self) -> str:
        return f"'{self.name}' of {self.distribution} {self.version}"


class Registry(Generic[P]):
    """The classes of one kind of part, by name. Read-only once the plugins are loaded."""

    def __init__(self, kind: str, broken: Mapping[str, PluginInfo]) -> None:
        self.kind = kind
        self._broken = broken
        self._parts: dict[str, list[tuple[P, PluginInfo]]] = {}

    def add(self, part: P, origin: PluginInfo) -> None:
        self._parts.setdefault(part.name, []).append((part, origin))  # type: ignore[attr-defined]
        origin.parts.append(f"{self.kind} {part.name}")  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[P]:
        """The parts that exist exactly once, in order of registration."""
        return (claims[0][0] for claims in self._parts.values() if len(claims) == 1)

    def names(self) -> list[str]:
        return sorted(self._parts)

    def get(self, name: str) -> P:
        """The part called ``name``; raises `LoadError` with the reason if there is none."""
        claims = self._parts.get(name, [])
        if len(claims) == 1:
            return claims[0][0]
        if claims:
            owners = " and ".join(str(origin) for _, origin in claims)
            raise LoadError(f"{self.kind} '{name}' is claimed by both {owners}: uninstall one, or use --plugins")
        if name in self._broken:
            raise LoadError(f"plugin {self._broken[name]} is broken: {self._broken[name].error}")
        raise LoadError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        nearest = get_close_matches(name, self._parts, 1)
        hint = f"did you mean '{nearest[0]}'? " if nearest else ""
        return f"no plugin provides {self.kind} '{name}'; {hint}installed: {', '.join(self.names())}"


class Plugins:
    """The plugins of one server, and the registries that they filled."""

    def __init__(self) -> None:
        self.plugins: list[PluginInfo] = []
        self._broken: dict[str, PluginInfo] = {}
        self._modules: list[tuple[PluginInfo, ModuleType]] = []
        self.backends: Registry[type[Backend]] = Registry("backend", self._broken)
        self.schedulers: Registry[type[Scheduler]] = Registry("scheduler", self._broken)
        self.frontends: Registry[type[Frontend]] = Registry("frontend", self._broken)
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        self._kinds: Mapping[str, Registry[Any]] = {
            "register_backends": self.backends,
            "register_schedulers": self.schedulers,
            "register_frontends": self.frontends,
        }

    @classmethod
    def discover(cls, allow: Sequence[str] | None = None) -> Plugins:
        """The built-in parts and those of every installed plugin, or only of those in ``allow``."""
        plugins = cls()
        plugins._add(PluginInfo("builtins", "penstock", version("penstock")), lambda: builtins)
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            if allow is None or entry.name in allow:
                plugins._add(_describe(entry), entry.load)
        return plugins

    @property
    def hook(self) -> Any:
        """The hooks that are called after the registries are filled."""
        return self._manager.hook

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Let each plugin add its options to ``parser``; one that raises is broken from then on."""
        for info, module in self._modules:
            self._ask_for_options(info, module, parser)

    def _ask_for_options(self, info: PluginInfo, module: ModuleType, parser: argparse.ArgumentParser) -> None:
        try:
            getattr(module, "add_options", _no_options)(parser)
        except Exception as error:  # as in _add
            self._break(info, error)

    def register(self, plugin: object) -> None:
        """Take part in the hooks with an object that the server itself has made."""
        self._manager.register(plugin)

    def _add(self, info: PluginInfo, load: Callable[[], ModuleType]) -> None:
        self.plugins.append(info)
        try:
            module = load()
            self._manager.register(module, f"{info.distribution}:{info.name}")
            self._refuse_unknown_hooks(module)
            self._collect(module, info)
            self._modules.append((info, module))
        except Exception as error:  # whatever a stranger's module may raise is kept as its reason
            self._break(info, error)

    def _break(self, info: PluginInfo, error: Exception) -> None:
        info.error = f"{type(error).__name__}: {error}"
        self._broken[info.name] = info

    def _refuse_unknown_hooks(self, module: ModuleType) -> None:
        known = [name for name in vars(hookspecs) if hasattr(getattr(hookspecs, name), "penstock_spec")]
        for name, value in vars(module).items():
            if hasattr(value, "penstock_impl") and name not in known:
                nearest = get_close_matches(name, known, 1)
                hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
                raise TypeError(f"there is no hook '{name}'{hint}")

    def _collect(self, module: ModuleType, info: PluginInfo) -> None:
        for hook, registry in self._kinds.items():
            for part in getattr(module, hook, tuple)():
                registry.add(part, info)


def _no_options(parser: argparse.ArgumentParser) -> None:
    """What a plugin without options adds."""


def _describe(entry: EntryPoint) -> PluginInfo:
    dist = entry.dist
    return PluginInfo(entry.name, dist.name if dist else "unknown", dist.version if dist else "unknown")
