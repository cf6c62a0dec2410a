"""The parts: the classes of each kind by name, and their plugins."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Generic, TypeVar

from headrace.command import Command
from headrace.config.option_groups import OptionGroup, group_flags
from headrace.config.options import ServerOptions
from headrace.config.parse import clip
from headrace.distributions import meant, missing
from headrace.errors import Code, ConfigError, LoadError
from headrace.frontends.base import HOSTED_PROTOCOLS, Frontend
from headrace.frontends.extension import Addition, Extension

P = TypeVar("P", bound=type)

#: The distribution of Headrace itself.
OWN = "headrace"


@dataclass(slots=True)
class PluginInfo:
    """One plugin: its origin, its parts, and the reason if it is broken.

    A broken plugin has no parts: ``withheld`` has those that it returned before the error. ``unmarked`` has the
    functions with a hook's name and without ``@hookimpl``, which are not called. ``hardware`` has the accelerators on
    which each of its backends has run.
    """

    name: str
    distribution: str
    version: str
    parts: list[str] = field(default_factory=list)
    error: str | None = None
    withheld: list[str] = field(default_factory=list)
    unmarked: list[str] = field(default_factory=list)
    hardware: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"'{self.name}' of {self.distribution} {self.version}"

    def faults(self) -> list[str]:
        """Return the problems of this plugin, a sentence each."""
        broken = [] if self.error is None else [f"plugin {self} is broken: {self.error}"]
        return broken + [
            f"plugin {self} has a function '{name}' without @hookimpl, which is not called" for name in self.unmarked
        ]

    def may_provide(self, part: str, name: str) -> bool:
        """True if ``part`` (``backend toy``), called ``name``, is probably missing because of a fault of this plugin.

        The parts of a plugin that cannot be imported are unknown. Its own name then decides.
        """
        distribution = normal_name(self.distribution)
        own = (normal_name(self.name), distribution, distribution.removeprefix("headrace-"))
        return part in self.withheld or normal_name(name) in own


class Registry(Generic[P]):
    """The classes of one kind of part, by name. Read-only once the plugins are loaded."""

    def __init__(self, kind: str, base: type, plugins: Sequence[PluginInfo]) -> None:
        """Every part is a subclass of ``base``. ``plugins`` are all plugins: a faulty one explains a missing part."""
        self.kind = kind
        #: The hook that returns parts of this kind.
        self.hook = "add_options" if kind == "option" else f"register_{kind}s"
        self._base = base
        self._plugins = plugins
        self._parts: dict[str, list[tuple[P, PluginInfo]]] = {}

    def require(self, part: object) -> str:
        """Return how ``part`` is shown (``backend toy``). Raises TypeError if it is no part of this kind."""
        if not (isinstance(part, type) and issubclass(part, self._base)):
            raise TypeError(f"{self.hook} returned {part!r}, which is no subclass of {self._base.__name__}")
        name = getattr(part, "name", None)
        if not isinstance(name, str) or not name:
            raise TypeError(f"{self.kind} {part.__name__} has no name, but {name!r}")
        if missing_methods := sorted(getattr(part, "__abstractmethods__", ())):
            raise TypeError(f"{self.kind} '{name}' lacks the methods {', '.join(missing_methods)}")
        _require_members(f"{self.kind} '{name}'", part, self._base)
        return f"{self.kind} {name}"

    def add(self, part: P, origin: PluginInfo) -> None:
        """Register ``part`` under its name. If another part has that name, `get` finds neither."""
        shown = self.require(part)
        self._parts.setdefault(part.name, []).append((part, origin))  # type: ignore[attr-defined]
        origin.parts.append(shown)
        if hardware := getattr(part, "hardware", ""):
            origin.hardware.append(f"{shown}: {hardware}")

    def __iter__(self) -> Iterator[P]:
        """Yield the parts in order of registration. Raises `LoadError` at the first name that two parts have."""
        return map(self.get, tuple(self._parts))

    def conflicts(self) -> dict[str, list[PluginInfo]]:
        """Return, for each name that more than one part has, the error and the plugins of these parts."""
        return {
            self._conflict(name): [info for _, info in owners]
            for name, owners in self._parts.items()
            if len(owners) > 1
        }

    def names(self) -> list[str]:
        return sorted(self._parts)

    def get(self, name: str) -> P:
        """Return the part called ``name``. Raises `LoadError` with the reason if there is none."""
        owners = self._parts.get(name, [])
        if len(owners) > 1:
            raise LoadError(self._conflict(name))
        if not owners:
            raise LoadError(self._explain(name), Code.INVALID_ARGUMENT)
        return owners[0][0]

    def _conflict(self, name: str) -> str:
        names = " and ".join(str(origin) for _, origin in self._parts[name])
        return f"{self.kind} '{name}' is registered by both {names}: uninstall one, or use --plugins"

    def _explain(self, name: str) -> str:
        faulty = [info for info in self._plugins if info.faults()]
        guilty = [info for info in faulty if info.may_provide(f"{self.kind} {name}", name)]
        if guilty:
            return "; ".join(text for info in guilty for text in info.faults())
        nearest = meant(self.kind, name, self._parts)
        hint = f"did you mean '{nearest}'? " if nearest else ""
        text = f"no plugin provides {self.kind} '{clip(name)}'; {hint}installed: {', '.join(self.names())}"
        if known := missing(self.kind, name):
            text = f"{known} {text}"
        broken = ", ".join(f"{info} ({info.error})" for info in faulty if info.error is not None)
        text = f"{text}; broken: {broken}" if broken else text
        return "; ".join([text, *(fault for info in faulty if self.hook in info.unmarked for fault in info.faults())])


class FrontendRegistry(Registry[type[Frontend]]):
    """The frontends. At most one host of each protocol is enabled."""

    def __init__(self, plugins: Sequence[PluginInfo]) -> None:
        super().__init__("frontend", Frontend, plugins)

    def require(self, part: object) -> str:
        shown = super().require(part)
        protocol = part.protocol  # type: ignore[attr-defined]
        if protocol not in ("", *HOSTED_PROTOCOLS):
            known = " and ".join(HOSTED_PROTOCOLS)
            raise TypeError(f"{shown} hosts the protocol {protocol!r}; protocols with hosts are {known}")
        part.check()  # type: ignore[attr-defined]
        return shown

    def chosen(self, options: ServerOptions) -> list[type[Frontend]]:
        """Return the frontends that ``options`` choose: one host of each protocol, and all that are no host.

        Raises `LoadError` for two frontends of one name. Raises `ConfigError` for a host that is not there, and for
        options of one that is not chosen.
        """
        parts = list(self)
        hosts = [self.host(options, protocol) for protocol in HOSTED_PROTOCOLS]
        others = [part for part in parts if part.protocol and part not in hosts]
        for group in options.plugin_options:
            for host in others:
                if group.name == host.name and group != type(group)():
                    flag = f"--{host.protocol}-server={host.name}"
                    raise ConfigError(f"the options --{group.name}-... have no effect without {flag}")
        return [part for part in parts if part not in others]

    def host(self, options: ServerOptions, protocol: str) -> type[Frontend]:
        """Return the host of ``protocol`` that ``options`` choose. Core's own has the name of the protocol.

        Raises `ConfigError` if it is not there.
        """
        name = getattr(options, f"{protocol}_server")
        flag = f"--{protocol}-server={name}"
        try:
            kind = self.get(protocol if name == "native" else name)
        except LoadError as error:
            raise ConfigError(f"{flag}: {error.message}") from error
        if kind.protocol != protocol:
            known = ", ".join(part.name for part in self if part.protocol == protocol and part.name != protocol)
            raise ConfigError(f"{flag}: '{name}' is no host of {protocol}; there are: native{known and ', '}{known}")
        return kind


class OptionRegistry(Registry[type[OptionGroup]]):
    """The option groups, by the prefix of their flags."""

    def __init__(self, plugins: Sequence[PluginInfo]) -> None:
        super().__init__("option", OptionGroup, plugins)

    def require(self, part: object) -> str:
        shown = super().require(part)
        group_flags(part)  # type: ignore[arg-type]
        return f"{shown.replace(' ', 's --')}-..."

    def __iter__(self) -> Iterator[type[OptionGroup]]:
        """Yield the groups in order of registration. Raises `ConfigError` at the first name that two groups have."""
        for text in self.conflicts():
            raise ConfigError(text)
        return super().__iter__()


class CommandRegistry(Registry[type[Command]]):
    """The commands. None can have the name of one of core's, which are registered first."""

    def __init__(self, plugins: Sequence[PluginInfo]) -> None:
        super().__init__("command", Command, plugins)

    def require(self, part: object) -> str:
        shown = super().require(part)
        name: str = part.name  # type: ignore[attr-defined]
        if not re.fullmatch("[a-z][a-z0-9-]*", name):
            raise TypeError(f"command '{name}': expected small letters, digits and '-', beginning with a letter")
        if not getattr(part, "help", ""):
            raise TypeError(f"command '{name}' has no help, its line in 'headrace --help'")
        if any(info.distribution == OWN and own is not part for own, info in self._parts.get(name, ())):
            raise TypeError(f"command '{name}' is Headrace's own")
        return shown


class ExtensionRegistry(Registry[type[Extension]]):
    """The extensions by name, with their additions. Two additions that callers could not distinguish are a conflict."""

    def __init__(self, plugins: Sequence[PluginInfo]) -> None:
        super().__init__("extension", Extension, plugins)
        self._additions: list[tuple[type[Addition], PluginInfo]] = []
        #: The additions that are made twice, by the text about each.
        self._clashes: dict[str, list[PluginInfo]] = {}
        self.keys = set[str]()  # the `Extension.model_parameters` of all

    def require(self, part: object) -> str:
        """`Registry.require`. Raises TypeError for an addition that is none, too."""
        shown = super().require(part)
        for addition in part.adds:  # type: ignore[attr-defined]  # it is an extension
            if not (isinstance(addition, type) and issubclass(addition, Addition)):
                raise TypeError(f"{shown} adds {addition!r}, which is no subclass of Addition")
            name = getattr(addition, "name", None)
            if not isinstance(name, str) or not name:
                added = f"{addition.kind} {addition.__name__}"
                raise TypeError(f"{shown} adds the {added}, which has no name, but {name!r}")
            addition.check()
        return shown

    def refuse_own(self, part: type[Extension]) -> None:
        """Raise TypeError if ``part``, which is not registered yet, adds what Headrace itself has."""
        for addition in part.adds:
            for own, origin in self._additions:
                if origin.distribution == OWN and addition.clashes_with(own):
                    raise TypeError(
                        f"{addition.kind} '{addition.name}' is one that Headrace itself answers, as '{own.name}'"
                        f"{addition._clash_rule}"
                    )

    def add(self, part: type[Extension], origin: PluginInfo) -> None:
        super().add(part, origin)
        self.keys |= {*part.model_parameters}
        for addition in part.adds:
            if origin.distribution != OWN:  # the order of Headrace's own decides between them
                self._note_clashes(addition, origin)
                origin.parts.append(f"{addition.kind} {addition.name}")
            self._additions.append((addition, origin))

    def _note_clashes(self, addition: type[Addition], origin: PluginInfo) -> None:
        """Record an earlier addition that cannot be distinguished from ``addition``."""
        for other, owner in self._additions:
            if addition.clashes_with(other):
                text = f"{other.kind} '{other.name}' is registered by both {owner} and {origin}"
                self._clashes[f"{text}: uninstall one, or use --plugins"] = [owner, origin]

    def conflicts(self) -> dict[str, list[PluginInfo]]:
        return {**super().conflicts(), **self._clashes}

    def __iter__(self) -> Iterator[type[Extension]]:
        """Yield the extensions in order of registration. Raises `LoadError` at the first conflict."""
        for text in self.conflicts():
            raise LoadError(text)
        return super().__iter__()


def _require_members(shown: str, part: type, base: type) -> None:
    """Raise TypeError if a member of ``part`` cannot stand in for the member of ``base`` that it overrides."""
    parameters = vars(part).get("Parameters")
    if parameters is not None and not (is_dataclass(parameters) and all(map(_has_default, fields(parameters)))):
        raise TypeError(f"{shown}: 'Parameters' must be a dataclass in which every field has a default")
    own_names = {name for kind in part.__mro__[: part.__mro__.index(base)] for name in vars(kind)}
    for name in sorted(own_names.intersection(dir(base))):
        declared, own = getattr(base, name), inspect.getattr_static(part, name)
        if isinstance(declared, tuple) and isinstance(own, str | type):
            raise TypeError(f"{shown}: '{name}' is {own!r}, expected a tuple")
        if isinstance(declared, property) and inspect.isfunction(own):
            raise TypeError(f"{shown}: '{name}' is a method, expected a property")
        if not (inspect.isfunction(declared) and inspect.isfunction(own)):
            continue
        if inspect.iscoroutinefunction(declared) and not inspect.iscoroutinefunction(own):
            raise TypeError(f"{shown}: '{name}' must be an async method")
        wanted, most = declared.__code__.co_argcount, own.__code__.co_argcount
        takes_any = own.__code__.co_flags & inspect.CO_VARARGS
        if not (most - len(own.__defaults__ or ()) <= wanted and (wanted <= most or takes_any)):
            raise TypeError(f"{shown}: '{name}' takes {inspect.signature(own)}, expected {inspect.signature(declared)}")


def _has_default(each: Field[object]) -> bool:
    return each.default is not MISSING or each.default_factory is not MISSING


def normal_name(name: str) -> str:
    """Return ``name`` of a plugin or a distribution without the differences in spelling that do not matter."""
    return name.lower().replace("_", "-")
