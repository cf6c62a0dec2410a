"""Chooses the distributions of a bundle from those that are installed here."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import Distribution, EntryPoint, distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headrace import Backend, ConfigError

_GROUP = "headrace"
_CORE = "headrace"


@dataclass
class DistributionChoice:
    """The distributions that pip must find. ``engines`` are the distributions of backends that models need."""

    #: Folders and wheels from which distributions were installed: no index has them.
    sources: list[str] = field(default_factory=list)
    #: Requirements of one version each, such as ``numpy==2.2.6``.
    pinned: list[str] = field(default_factory=list)
    #: The versions that are installed here of everything that these need.
    constraints: list[str] = field(default_factory=list)
    engines: Sequence[str] = ()


@dataclass(frozen=True)
class _Plugin:
    distribution: str
    #: The backends that it registers.
    backends: frozenset[str] = frozenset()


def choose(backends: Collection[str], plugins: Collection[str] | None) -> DistributionChoice:
    """Return core, the engines of ``backends``, and ``plugins`` by the name of entry point or distribution.

    None selects all installed plugins without a backend. Raises `ConfigError` for one that is not
    installed. The caller has checked that the backends are.
    """
    installed = _installed_plugins()
    wanted = {_CORE}
    for backend in sorted(backends):
        owners = [each.distribution for each in installed.values() if backend in each.backends]
        wanted |= {*owners[:1]}  # without an owner, it is core's, or a plugin finds it by its name
    engines = sorted(wanted - {_CORE})
    if plugins is None:
        wanted |= {each.distribution for each in installed.values() if not each.backends}
    else:
        named = {**installed, **{each.distribution: each for each in installed.values()}}
        for name in plugins:
            if name not in named:
                near = get_close_matches(name, named, 1)
                hint = f"did you mean '{near[0]}'? " if near else ""
                raise ConfigError(
                    f"--plugins: no plugin '{name}' is installed; {hint}installed: {', '.join(installed)}"
                )
            wanted.add(named[name].distribution)
    return _requirements(wanted, engines)


def _installed_plugins() -> dict[str, _Plugin]:
    """Return the plugins that are installed beside core's own, by the name of their entry point."""
    found = {}
    for one in distributions():
        for entry in one.entry_points.select(group=_GROUP):
            found[entry.name] = _Plugin(canonicalize_name(one.name), _backends_of(entry))
        if is_program(one):
            found[canonicalize_name(one.name).removeprefix("headrace-")] = _Plugin(canonicalize_name(one.name))
    return found


def is_program(one: Distribution) -> bool:
    """True if ``one`` is a program for core, such as ``tritonserver``, and no plugin."""
    groups = one.entry_points.groups
    return _GROUP not in groups and "console_scripts" in groups and _needs_core(one)


def _backends_of(entry: EntryPoint) -> frozenset[str]:
    try:
        register = getattr(entry.load(), "register_backends", None)
        classes: Sequence[type[Backend]] = register() if register else ()
        return frozenset(each.name for each in classes)
    except (Exception, SystemExit):  # a plugin may raise anything; a broken one is as broken in the bundle
        return frozenset()


def _requirements(roots: Collection[str], engines: Sequence[str]) -> DistributionChoice:
    choice = DistributionChoice(engines=engines)
    extra = {name for root in roots for name in _installed_extras(distribution(root))}
    for name in sorted(_closure({*roots, *extra})):
        one = distribution(name)
        source = _source_of(one)
        if source:
            choice.sources.append(source)
        else:
            choice.constraints.append(f"{name}=={one.version}")
            if name in roots or name in extra:
                choice.pinned.append(f"{name}=={one.version}")
    return choice


def _installed_extras(one: Distribution) -> Iterator[str]:
    """Yield the installed distributions in the extras of a plugin, except plugins and development tools."""
    for text in one.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            continue
        if not any(
            requirement.marker.evaluate({"extra": extra}) for extra in one.metadata.get_all("Provides-Extra") or ()
        ):
            continue
        found = _find(requirement.name)
        if found is not None and found.version in requirement.specifier and not _needs_core(found):
            yield canonicalize_name(requirement.name)


def _closure(names: Collection[str]) -> set[str]:
    """Return ``names`` and their installed requirements."""
    seen: set[tuple[str, str]] = set()
    waiting = [(name, "") for name in names]
    while waiting:
        name, extra = waiting.pop()
        one = _find(name)
        if one is None or (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in one.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(requirement.name), each) for each in ("", *requirement.extras)]
    return {name for name, _ in seen}


def _find(name: str) -> Distribution | None:
    return next(iter(Distribution.discover(name=name)), None)


def _needs_core(one: Distribution) -> bool:
    return any(canonicalize_name(Requirement(text).name) == _CORE for text in one.requires or ())


def _source_of(one: Distribution) -> str:
    """Return the folder or the wheel from which ``one`` was installed; empty if it came from an index (PEP 610)."""
    text = one.read_text("direct_url.json")
    url = json.loads(text)["url"] if text else ""
    path = unquote(urlsplit(url).path) if url.startswith("file://") else ""
    return path if path and Path(path).exists() else ""
