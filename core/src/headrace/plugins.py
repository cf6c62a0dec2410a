"""Finds plugins, fills the registries, and explains what is broken.

One `Plugins` per server; there is no global manager. A plugin that cannot be imported, or whose
hooks do not match, is kept with the reason. None of its parts is registered and none of its hooks
is called: it stops nobody but the model that needs it, which fails to load with that same reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points, version
from types import ModuleType
from typing import Any

import pluggy

from headrace import builtins, hookspecs
from headrace.backends.base import Backend
from headrace.caches.base import ResponseCache
from headrace.errors import ConfigError
from headrace.frontends.base import Frontend
from headrace.models.entrance import Interceptor
from headrace.registry import OptionRegistry, PluginInfo, Registry, RouteRegistry
from headrace.schedulers.base import Scheduler

log = logging.getLogger(__name__)

GROUP = "headrace"


class Plugins:
    """The plugins of one server, and the registries that they filled."""

    def __init__(self) -> None:
        self.plugins: list[PluginInfo] = []
        self._broken: list[PluginInfo] = []
        self.backends: Registry[type[Backend]] = Registry("backend", Backend, self._broken)
        self.schedulers: Registry[type[Scheduler]] = Registry("scheduler", Scheduler, self._broken)
        self.caches: Registry[type[ResponseCache]] = Registry("cache", ResponseCache, self._broken)
        self.frontends: Registry[type[Frontend]] = Registry("frontend", Frontend, self._broken)
        self.routes = RouteRegistry(self._broken)
        self.interceptors: Registry[type[Interceptor]] = Registry("interceptor", Interceptor, self._broken)
        self.options = OptionRegistry(self._broken)
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        self._kinds: Mapping[str, Registry[Any]] = {
            "register_backends": self.backends,
            "register_schedulers": self.schedulers,
            "register_frontends": self.frontends,
            "register_caches": self.caches,
            "register_routes": self.routes,
            "register_interceptors": self.interceptors,
            "add_options": self.options,
        }

    @classmethod
    def discover(cls, allow: Sequence[str] | None = None) -> Plugins:
        """Return the parts of every installed plugin, or only of those in ``allow`` and of core's own distribution.

        Raises `ConfigError` for a name in ``allow`` that is neither a plugin's nor its distribution's.
        """
        plugins, built_in = cls(), PluginInfo("builtins", "headrace", version("headrace"))
        plugins._add(built_in, lambda: builtins)
        found = [(_describe(entry), entry) for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)]
        _refuse_unknown(allow or (), [built_in, *(info for info, _ in found)])
        for info, entry in found:
            if allow is None or built_in.distribution == info.distribution or {info.name, info.distribution} & {*allow}:
                plugins._add(info, entry.load)
        return plugins

    @property
    def hook(self) -> Any:
        """The hooks that are called after the registries are filled."""
        return self._manager.hook

    @property
    def complaints(self) -> list[str]:
        """What is wrong: each broken plugin with its reason, and each part that two of them claim."""
        broken = [f"plugin {info} is broken: {info.error}" for info in self._broken]
        return broken + [text for registry in self._kinds.values() for text in registry.conflicts()]

    def conflicts_of(self, info: PluginInfo) -> list[str]:
        """Which parts of ``info`` cannot be used, because another plugin has one of that name."""
        found = [pair for registry in self._kinds.values() for pair in registry.conflicts().items()]
        return [text for text, claimants in found if info in claimants]

    def register(self, plugin: object) -> None:
        """Take part in the hooks with an object that the server itself has made."""
        self._manager.register(plugin)

    def tell(self, hook: str, **given: Any) -> None:
        """Call ``hook`` of every plugin. A raise is logged, and keeps nobody else from being told."""
        plugins = {id(one.plugin): one.plugin for one in getattr(self.hook, hook).get_hookimpls()}
        for plugin in plugins.values():
            others = [other for other in plugins.values() if other is not plugin]
            try:
                self._manager.subset_hook_caller(hook, others)(**given)
            except KeyboardInterrupt:  # on the event loop's thread it is the operator's
                raise
            except BaseException:
                log.exception("plugin '%s' failed in %s", self._manager.get_name(plugin), hook)

    def _add(self, info: PluginInfo, load: Callable[[], ModuleType]) -> None:
        self.plugins.append(info)
        parts: list[tuple[Registry[Any], Any]] = []
        try:
            module = load()
            self._collect(module, parts)
            self._refuse_unknown_hooks(module)
            self._manager.register(module, _name(info))
        except (Exception, SystemExit) as error:  # whatever a stranger's module may raise is kept as its reason
            info.withheld = [registry.require(part) for registry, part in parts]
            self._break(info, error)
            return
        for registry, part in parts:
            registry.add(part, info)

    def _break(self, info: PluginInfo, error: BaseException) -> None:
        """Nothing of this plugin counts from now on."""
        info.error = f"{type(error).__name__}: {error}"
        info.withheld += info.parts
        info.parts = []
        self._broken.append(info)
        for registry in self._kinds.values():
            registry.withdraw(info)
        if self._manager.has_plugin(_name(info)):
            self._manager.unregister(name=_name(info))

    def _refuse_unknown_hooks(self, module: ModuleType) -> None:
        known = [name for name in vars(hookspecs) if hasattr(getattr(hookspecs, name), "headrace_spec")]
        for name, value in vars(module).items():
            if hasattr(value, "headrace_impl") and name not in known:
                nearest = get_close_matches(name, known, 1)
                hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
                raise TypeError(f"there is no hook '{name}'{hint}")

    def _collect(self, module: ModuleType, parts: list[tuple[Registry[Any], Any]]) -> None:
        """Ask ``module`` for its parts; those that it gave before a raise are in ``parts``, too."""
        for hook, registry in self._kinds.items():
            for part in getattr(module, hook, tuple)():
                registry.require(part)
                parts.append((registry, part))


def _name(info: PluginInfo) -> str:
    return f"{info.distribution}:{info.name}"


def _refuse_unknown(allow: Sequence[str], installed: Sequence[PluginInfo]) -> None:
    names = {name for info in installed for name in (info.name, info.distribution)}
    for name in allow:
        if name not in names:
            nearest = get_close_matches(name, names, 1)
            hint = f"did you mean '{nearest[0]}'? " if nearest else ""
            known = ", ".join(sorted(info.name for info in installed))
            raise ConfigError(f"--plugins: no plugin '{name}' is installed; {hint}installed: {known}")


def _describe(entry: EntryPoint) -> PluginInfo:
    dist = entry.dist
    return PluginInfo(entry.name, dist.name if dist else "unknown", dist.version if dist else "unknown")
