"""Which parts there are: the classes of one kind, by name, and the plugins that bring them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.config.option_groups import OptionGroup, group_flags
from headrace.distributions import meant, missing
from headrace.errors import Code, ConfigError, LoadError
from headrace_http.plugin_routes import HttpRoute, clash, read_route

P = TypeVar("P", bound=type)


@dataclass(slots=True)
class PluginInfo:
    """One plugin: where it comes from, which parts it brings, and why it is broken, if it is.

    A broken one brings nothing; what it would have brought, as far as that is known, is
    ``withheld``. ``unproven`` is what parts say of themselves that has never run where it is meant to.
    """

    name: str
    distribution: str
    version: str
    parts: list[str] = field(default_factory=list)
    error: str | None = None
    withheld: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"'{self.name}' of {self.distribution} {self.version}"

    def may_have_had(self, part: str, name: str) -> bool:
        """Whether ``part`` (``backend toy``), called ``name``, is missing because this plugin is broken.

        One that could not be imported has not said what it brings: then what it is called tells.
        """
        own = (_normal(self.name), _normal(self.distribution), _normal(self.distribution).removeprefix("headrace-"))
        return part in self.withheld or _normal(name) in own


class Registry(Generic[P]):
    """The classes of one kind of part, by name. Read-only once the plugins are loaded."""

    def __init__(self, kind: str, base: type, broken: Sequence[PluginInfo]) -> None:
        """``base`` is what every part is a subclass of; ``broken`` is looked at when a part is missing."""
        self.kind = kind
        self._hook = "add_options" if kind == "option" else f"register_{kind}s"
        self._base = base
        self._broken = broken
        self._claims: dict[str, list[tuple[P, PluginInfo]]] = {}

    def require(self, part: object) -> str:
        """How ``part`` is shown (``backend toy``); raises TypeError if it is no part of this kind."""
        if not (isinstance(part, type) and issubclass(part, self._base)):
            raise TypeError(f"{self._hook} returned {part!r}, which is no subclass of {self._base.__name__}")
        name = getattr(part, "name", None)
        if not isinstance(name, str) or not name:
            raise TypeError(f"{self.kind} {part.__name__} has no name, but {name!r}")
        return f"{self.kind} {name}"

    def add(self, part: P, origin: PluginInfo) -> None:
        """Have ``part`` found by its name. If that is taken, neither is found any more."""
        shown = self.require(part)
        self._claims.setdefault(part.name, []).append((part, origin))  # type: ignore[attr-defined]
        origin.parts.append(shown)
        if unproven := getattr(part, "unproven", ""):
            origin.unproven.append(f"{shown}: {unproven}")

    def withdraw(self, origin: PluginInfo) -> None:
        """Forget the parts of ``origin``."""
        for name, claims in tuple(self._claims.items()):
            left = [(part, info) for part, info in claims if info is not origin]
            self._claims[name] = left
            if not left:
                del self._claims[name]

    def __iter__(self) -> Iterator[P]:
        """The parts, in order of registration; raises `LoadError` at the first name that two claim."""
        return map(self.get, tuple(self._claims))

    def conflicts(self) -> dict[str, list[PluginInfo]]:
        """What is wrong with each name that more than one part claims, and who they are."""
        return {
            self._conflict(name): [info for _, info in claims]
            for name, claims in self._claims.items()
            if len(claims) > 1
        }

    def names(self) -> list[str]:
        return sorted(self._claims)

    def get(self, name: str) -> P:
        """The part called ``name``; raises `LoadError` with the reason if there is none."""
        claims = self._claims.get(name, [])
        if len(claims) > 1:
            raise LoadError(self._conflict(name))
        if not claims:
            raise LoadError(self._explain(name), Code.INVALID_ARGUMENT)
        return claims[0][0]

    def _conflict(self, name: str) -> str:
        owners = " and ".join(str(origin) for _, origin in self._claims[name])
        return f"{self.kind} '{name}' is claimed by both {owners}: uninstall one, or use --plugins"

    def _explain(self, name: str) -> str:
        guilty = [info for info in self._broken if info.may_have_had(f"{self.kind} {name}", name)]
        if guilty:
            return "; ".join(f"plugin {info} is broken: {info.error}" for info in guilty)
        nearest = meant(self.kind, name, self._claims)
        hint = f"did you mean '{nearest}'? " if nearest else ""
        text = f"no plugin provides {self.kind} '{name}'; {hint}installed: {', '.join(self.names())}"
        if known := missing(self.kind, name):
            text = f"{known} {text}"
        suspects = ", ".join(f"{info} ({info.error})" for info in self._broken)
        return f"{text}; broken: {suspects}" if suspects else text


class OptionRegistry(Registry[type[OptionGroup]]):
    """The option groups, by the word that begins their flags."""

    def __init__(self, broken: Sequence[PluginInfo]) -> None:
        super().__init__("option", OptionGroup, broken)

    def require(self, part: object) -> str:
        shown = super().require(part)
        group_flags(part)  # type: ignore[arg-type]
        return f"{shown.replace(' ', 's --')}-..."

    def __iter__(self) -> Iterator[type[OptionGroup]]:
        """Raises `ConfigError` at the first name that two claim."""
        for text in self.conflicts():
            raise ConfigError(text)
        return super().__iter__()


class RouteRegistry(Registry[type[HttpRoute]]):
    """The HTTP routes, by method and path. A claim on one is a claim on all that it overlaps with."""

    def __init__(self, broken: Sequence[PluginInfo]) -> None:
        super().__init__("route", HttpRoute, broken)

    def require(self, part: object) -> str:
        shown = super().require(part)
        read_route(part)  # type: ignore[arg-type]
        return shown

    def add(self, part: type[HttpRoute], origin: PluginInfo) -> None:
        origin.parts.append(self.require(part))
        taken = [name for name, claims in self._claims.items() if any(clash(part, other) for other, _ in claims)]
        for name in taken or [part.name]:
            self._claims.setdefault(name, []).append((part, origin))


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")
