"""Find plugins, let pluggy call their hooks, fill the registries, and explain what is broken.

There is one `Plugins` per server and no global manager. A plugin is broken if its module cannot be imported, if a
hook of it does not match its specification, or if a `register_*` hook raises. None of its parts is registered and none
of its hooks is called. It stops no server: only a model that needs it fails to load, with the same reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib.metadata import Distribution, EntryPoint, distribution, distributions, version
from itertools import chain
from typing import Any, TypeVar

import pluggy

from headrace import builtins, hookspecs
from headrace.agents.base import RepositoryAgent
from headrace.backends.base import Backend
from headrace.caches.base import ResponseCache
from headrace.errors import ConfigError
from headrace.executors.kind import ExecutorKind
from headrace.models.interceptors import Interceptor
from headrace.registry import (
    CommandRegistry,
    ExtensionRegistry,
    FrontendRegistry,
    OptionRegistry,
    PluginInfo,
    Registry,
    normal_name,
)
from headrace.schedulers.base import Scheduler
from headrace.storage.base import Storage

log = logging.getLogger(__name__)

GROUP = "headrace"

R = TypeVar("R", bound=Registry[Any])


class Plugins:
    """The plugins of one server, and the registries of their parts."""

    def __init__(self) -> None:
        self.plugins: list[PluginInfo] = []
        #: One registry for each kind of part. The kind's hook is `Registry.hook`.
        self.registries: list[Registry[Any]] = []
        self.backends = self._kind(Registry[type[Backend]]("backend", Backend, self.plugins))
        self.schedulers = self._kind(Registry[type[Scheduler]]("scheduler", Scheduler, self.plugins))
        self.executors = self._kind(Registry[type[ExecutorKind]]("executor", ExecutorKind, self.plugins))
        self.caches = self._kind(Registry[type[ResponseCache]]("cache", ResponseCache, self.plugins))
        self.frontends = self._kind(FrontendRegistry(self.plugins))
        self.storages = self._kind(Registry[type[Storage]]("storage", Storage, self.plugins))
        self.agents = self._kind(Registry[type[RepositoryAgent]]("agent", RepositoryAgent, self.plugins))
        self.extensions = self._kind(ExtensionRegistry(self.plugins))
        self.interceptors = self._kind(Registry[type[Interceptor]]("interceptor", Interceptor, self.plugins))
        self.commands = self._kind(CommandRegistry(self.plugins))
        self.options = self._kind(OptionRegistry(self.plugins))
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)

    def _kind(self, registry: R) -> R:
        self.registries.append(registry)
        return registry

    @classmethod
    def discover(cls, allow: Sequence[str] | None = None) -> Plugins:
        """Return the parts of every installed plugin, or only of those in ``allow`` and of core's own distribution.

        Raises `ConfigError` if a name in ``allow`` is neither a plugin nor a distribution with one.
        """
        plugins, built_in = cls(), PluginInfo("builtins", "headrace", version("headrace"))
        plugins._add(built_in, lambda: builtins)
        # Headrace's own first: a plugin that adds what Headrace itself has is broken, and not Headrace.
        installed = sorted(_installed(), key=lambda pair: (pair[0].distribution != built_in.distribution, pair[0].name))
        _refuse_unknown(allow or (), [built_in, *(info for info, _ in installed)])
        for info, entry in installed:
            if allow is None or built_in.distribution == info.distribution or {info.name, info.distribution} & {*allow}:
                plugins._add(info, entry.load)
        return plugins

    @property
    def hook(self) -> Any:
        """The hooks that are called after the registries are filled."""
        return self._manager.hook

    @property
    def complaints(self) -> list[str]:
        """Return the problems: broken plugins, functions without ``@hookimpl``, names that two plugins use."""
        texts = [text for info in self.plugins for text in info.faults()]
        return texts + [text for registry in self.registries for text in registry.conflicts()]

    def conflicts_of(self, info: PluginInfo) -> list[str]:
        """Return the parts of ``info`` that cannot be used because another part has the same name."""
        conflicts = [pair for registry in self.registries for pair in registry.conflicts().items()]
        return [text for text, owners in conflicts if info in owners]

    def register(self, plugin: object) -> None:
        """Add an object of the server itself, whose methods are marked ``@hookimpl``."""
        self._manager.register(plugin)

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call ``hook`` of every plugin. If one raises, log that and call the others all the same."""
        plugins = {id(one.plugin): one.plugin for one in getattr(self.hook, hook).get_hookimpls()}
        for plugin in plugins.values():
            try:
                self._hook_of(plugin, hook)(**arguments)
            except KeyboardInterrupt:  # on the event loop's thread, the operator interrupts it
                raise
            except BaseException:
                log.exception("plugin '%s' failed in %s", self._manager.get_name(plugin), hook)

    def _hook_of(self, plugin: object, hook: str) -> Any:
        """Return ``hook`` as pluggy calls it of ``plugin`` alone."""
        made = [one.plugin for one in getattr(self.hook, hook).get_hookimpls()]
        return self._manager.subset_hook_caller(hook, [other for other in made if other is not plugin])

    def _add(self, info: PluginInfo, load: Callable[[], object]) -> None:
        self.plugins.append(info)
        parts: list[tuple[Registry[Any], Any]] = []
        name = f"{info.distribution}:{info.name}"
        try:
            plugin = load()
            if self._manager.is_registered(plugin):
                raise ValueError(f"plugin '{self._manager.get_name(plugin)}' is the same object")
            info.unmarked = [hook for hook in _SPECS if self._is_unmarked(plugin, hook)]
            self._manager.register(plugin, name)
            self._collect(plugin, parts)
            self._refuse_unknown_hooks(plugin)
        except (Exception, SystemExit) as error:  # a plugin may raise anything: keep it as the reason
            info.withheld = [registry.require(part) for registry, part in parts]
            info.error = f"{type(error).__name__}: {error}"
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            return
        for registry, part in parts:
            registry.add(part, info)

    def _is_unmarked(self, plugin: object, hook: str) -> bool:
        """True if ``plugin`` has a function named ``hook`` without ``@hookimpl``, which pluggy does not call."""
        if hook not in dir(plugin) or self._manager.parse_hookimpl_opts(plugin, hook) is not None:
            return False
        return callable(getattr(plugin, hook))

    def _refuse_unknown_hooks(self, plugin: object) -> None:
        """Raise `TypeError` if ``plugin`` implements a hook that does not exist."""
        for hook in self._manager.get_hookcallers(plugin) or ():
            for made in hook.get_hookimpls():
                if made.plugin is plugin and not (hook.has_spec() or made.optionalhook):
                    nearest = get_close_matches(hook.name, _SPECS, 1)
                    hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
                    raise TypeError(f"there is no hook '{hook.name}'{hint}")

    def _collect(self, plugin: object, parts: list[tuple[Registry[Any], Any]]) -> None:
        """Call the hooks of ``plugin`` that return parts. If one raises, ``parts`` has the results of the others."""
        for registry in self.registries:
            hook = self._hook_of(plugin, registry.hook)
            returned = hook()
            if len(returned) < sum(not (made.wrapper or made.hookwrapper) for made in hook.get_hookimpls()):
                raise TypeError(f"{registry.hook} returned None, expected a list of classes")
            for parts_of_one in returned:
                if isinstance(parts_of_one, type) or not isinstance(parts_of_one, Iterable):
                    raise TypeError(f"{registry.hook} returned {parts_of_one!r}, expected a list of classes")
            for part in chain.from_iterable(returned):
                registry.require(part)
                parts.append((registry, part))
                if registry is self.extensions:
                    self.extensions.refuse_own(part)
                    for group in part.options:
                        self.options.require(group)
                        parts.append((self.options, group))


#: The names of all hooks.
_SPECS = [name for name, value in vars(hookspecs).items() if hasattr(value, "headrace_spec")]


def _refuse_unknown(allow: Sequence[str], installed: Sequence[PluginInfo]) -> None:
    names = {name for info in installed for name in (info.name, info.distribution)}
    for name in allow:
        if name not in names:
            nearest = get_close_matches(name, names, 1)
            hint = f"did you mean '{nearest[0]}'? " if nearest else ""
            known = ", ".join(sorted(info.name for info in installed))
            raise ConfigError(f"--plugins: no plugin '{name}' is installed; {hint}installed: {known}")


def _installed() -> list[tuple[PluginInfo, EntryPoint]]:
    """Return the installed plugins. Of two distributions with one name, the first on ``sys.path`` counts.

    `importlib.metadata.entry_points` finds the same, but parses the entry points of every installed distribution.
    """
    named = {normal_name(_header(one, "Name")): one for one in distributions() if _may_have_plugins(one)}
    firsts = [distribution(name) if name else one for name, one in named.items()]
    return [
        (PluginInfo(entry.name, _header(one, "Name") or "unknown", _header(one, "Version") or "unknown"), entry)
        for one in firsts
        for entry in one.entry_points.select(group=GROUP)
    ]


def _may_have_plugins(one: Distribution) -> bool:
    return f"[{GROUP}]" in (one.read_text("entry_points.txt") or "")


def _header(one: Distribution, name: str) -> str:
    """Return a header of the metadata; empty if it is missing. `Distribution.metadata` parses the description, too."""
    text = one.read_text("METADATA") or one.read_text("PKG-INFO") or ""
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.lower() == name.lower():
            return value.strip()
    return ""
