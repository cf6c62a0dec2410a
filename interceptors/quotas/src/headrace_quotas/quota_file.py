"""The quota file: limits and weights by principal and model.

::

    {
      "defaults":   {"requests_per_second": 50, "in_flight": 8},
      "principals": {
        "alice":    {"requests_per_second": 500, "weight": 4},
        "batch-*":  {"weight": 0.5, "models": {"llm*": {"output_tokens_per_minute": 6000}}}
      },
      "anonymous":  {"requests_per_second": 1},
      "sharing":    {"llm*": {"max_wait_seconds": 10}}
    }

docs/quotas.md explains each member.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from headrace import ConfigError, one_line, read_regular

#: A larger file is refused. 10,000 principals with limits of their own have about 1 MB.
_MOST_BYTES = 64 << 20
_MOST_CHARACTERS = 256
_LARGEST = 1e15
#: The burst that belongs to each rate.
_BURSTS = {
    "requests_per_second": "burst",
    "input_bytes_per_second": "input_bytes_burst",
    "output_tokens_per_minute": "output_tokens_burst",
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Limits of one principal, for one model or for all together. None is no limit.

    A burst of None is what the rate gives in a second (requests, bytes) or in a minute (tokens), and at least one.
    """

    requests_per_second: float | None = None
    burst: float | None = None
    in_flight: int | None = None
    input_bytes_per_second: float | None = None
    input_bytes_burst: float | None = None
    output_tokens_per_minute: float | None = None
    output_tokens_burst: float | None = None

    def rates(self) -> list[tuple[str, float, float]]:
        """Return name, units per second and burst of each rate."""
        found = []
        for name, burst_name in _BURSTS.items():
            rate, burst = getattr(self, name), getattr(self, burst_name)
            if rate is not None:
                found.append((name, rate / 60 if name.endswith("minute") else rate, burst or max(1.0, rate)))
        return found

    def divided(self, workers: int) -> QuotaLimits:
        """Return the part of one of ``workers`` servers, which count by themselves. A number is rounded up."""
        rates = {name: getattr(self, name) for name in _BURSTS}
        bursts = {name: getattr(self, name) for name in _BURSTS.values()}
        return QuotaLimits(
            in_flight=None if self.in_flight is None else ceil(self.in_flight / workers),
            **{name: None if value is None else value / workers for name, value in rates.items()},
            **{name: None if value is None else max(1.0, value / workers) for name, value in bursts.items()},
        )


@dataclass(frozen=True, slots=True)
class Quota:
    """What one principal may use: ``limits`` of all models together, and those of each model by its pattern.

    ``place`` is where the file says so.
    """

    limits: QuotaLimits = field(default_factory=QuotaLimits)
    weight: float = 1.0
    models: tuple[tuple[str, QuotaLimits], ...] = ()
    place: str = "defaults"

    def of_model(self, model: str) -> tuple[str, QuotaLimits] | None:
        """Return the first pattern that matches ``model``, with its limits."""
        return first_match(self.models, model)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How principals share a model. ``in_flight`` of 0: as many requests as fill the batches of its instances."""

    in_flight: int = 0
    max_waiting: int = 1000
    max_waiting_bytes: int = 256 << 20
    max_wait_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class QuotaBook:
    """The quotas of all principals. ``anonymous`` holds for each address of callers without a principal."""

    defaults: Quota = field(default_factory=Quota)
    named: Mapping[str, Quota] = field(default_factory=dict)
    patterns: tuple[tuple[str, Quota], ...] = ()
    anonymous: Quota = field(default_factory=Quota)
    sharing: tuple[tuple[str, Sharing], ...] = ()

    def of_principal(self, name: str) -> Quota:
        """Return the quota under the name, else under the first pattern that matches it, else the defaults."""
        found = self.named.get(name)
        if found is None:
            match = first_match(self.patterns, name)
            found = self.defaults if match is None else match[1]
        return found

    def sharing_of(self, model: str) -> Sharing | None:
        match = first_match(self.sharing, model)
        return None if match is None else match[1]

    def divided(self, workers: int) -> QuotaBook:
        """Return the part of one of ``workers`` servers."""

        def part(quota: Quota) -> Quota:
            models = tuple((pattern, limits.divided(workers)) for pattern, limits in quota.models)
            return replace(quota, limits=quota.limits.divided(workers), models=models)

        return QuotaBook(
            part(self.defaults),
            {name: part(quota) for name, quota in self.named.items()},
            tuple((pattern, part(quota)) for pattern, quota in self.patterns),
            part(self.anonymous),
            self.sharing,
        )

    @classmethod
    def read(cls, path: Path) -> QuotaBook:
        """Read the file. Blocks. Raises `ConfigError` with the place in the file."""
        try:
            content = read_regular(path)
        except OSError as error:
            raise ConfigError(f"quota file '{path}' cannot be read: {error.strerror}") from error
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"quota file '{path}' has {len(content)} bytes; the limit is {_MOST_BYTES}")
        try:
            document = json.loads(content, object_pairs_hook=_without_duplicates)
            return _book(document)
        except (ValueError, RecursionError) as error:
            kind = "is no JSON: " if isinstance(error, RecursionError | json.JSONDecodeError | UnicodeError) else ""
            raise ConfigError(f"quota file '{path}'{'' if kind else ':'} {kind}{one_line(str(error))}") from None


def first_match(patterns: Iterable[tuple[str, T]], name: str) -> tuple[str, T] | None:
    """Return the first pattern that matches ``name``, with its value."""
    return next((each for each in patterns if fnmatchcase(name, each[0])), None)


def is_pattern(name: str) -> bool:
    return any(character in name for character in "*?[")


def _book(document: Any) -> QuotaBook:
    given = _members(document, "the file", ("defaults", "principals", "anonymous", "sharing"))
    defaults = _quota(given.get("defaults", {}), "defaults", Quota())
    quotas = {
        name: _quota(each, f"principals.{one_line(name)}", defaults)
        for name, each in _object(given.get("principals", {}), "principals").items()
        if _is_name(name, "principals")
    }
    sharing = [
        (pattern, _sharing(each, f"sharing.{one_line(pattern)}"))
        for pattern, each in _object(given.get("sharing", {}), "sharing").items()
        if _is_name(pattern, "sharing")
    ]
    return QuotaBook(
        defaults,
        {name: quota for name, quota in quotas.items() if not is_pattern(name)},
        tuple((name, quota) for name, quota in quotas.items() if is_pattern(name)),
        _quota(given.get("anonymous", {}), "anonymous", defaults),
        tuple(sharing),
    )


def _quota(given: Any, place: str, defaults: Quota) -> Quota:
    """Return the quota in ``given``, which has the limits of ``defaults`` that it does not name."""
    members = dict(_members(given, place, (*_names(QuotaLimits), "weight", "models")))
    weight = _number(members.pop("weight", defaults.weight), f"{place}.weight", 0.001, 1000)
    models = [
        (pattern, _limits(each, f"{place}.models.{one_line(pattern)}", QuotaLimits()))
        for pattern, each in _object(members.pop("models", {}), f"{place}.models").items()
        if _is_name(pattern, f"{place}.models")
    ]
    return Quota(_limits(members, place, defaults.limits), weight, (*models, *defaults.models), place)


def _limits(given: Any, place: str, defaults: QuotaLimits) -> QuotaLimits:
    members = _members(given, place, _names(QuotaLimits))
    values: dict[str, Any] = {}
    for name in _names(QuotaLimits):
        if members.get(name) is not None and name == "in_flight":
            values[name] = _integer(members[name], f"{place}.{name}")
        elif members.get(name) is not None:
            values[name] = _number(members[name], f"{place}.{name}", 1e-6 if name in _BURSTS else 1)
        elif name not in members:
            values[name] = getattr(defaults, name)
    for rate, burst in _BURSTS.items():
        if burst in members and members[burst] is not None and values.get(rate) is None:
            raise ValueError(f"{place}.{burst} needs {rate}")
        if rate in members and burst not in members:
            values.pop(burst, None)  # it belongs to the rate of the defaults
    return QuotaLimits(**values)


def _sharing(given: Any, place: str) -> Sharing:
    readers: dict[str, Callable[[Any, str], Any]] = {
        "in_flight": _integer,
        "max_waiting": _integer,
        "max_waiting_bytes": _integer,
        "max_wait_seconds": lambda value, where: _number(value, where, 0.001, 86_400),
    }
    members = _members(given, place, readers)
    return Sharing(**{name: readers[name](value, f"{place}.{name}") for name, value in members.items()})


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def _number(given: Any, place: str, least: float, most: float = _LARGEST) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not least <= given <= most:
        raise ValueError(f"{place} is {_shown(given)}; expected a number from {least:g} to {most:g}")
    return float(given)


def _integer(given: Any, place: str, least: int = 1) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not least <= given <= _LARGEST:
        raise ValueError(f"{place} is {_shown(given)}; expected a whole number from {least} to {_LARGEST:g}")
    return given


def _shown(given: Any) -> str:
    return one_line(json.dumps(given))[:60]


def _is_name(name: str, place: str) -> bool:
    if not name or len(name) > _MOST_CHARACTERS:
        raise ValueError(f"{place}: a name or pattern has 1 to {_MOST_CHARACTERS} characters, not {len(name)}")
    return True


def _object(given: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{place} is {_shown(given)}; expected an object")
    return given


def _members(given: Any, place: str, known: Iterable[str]) -> Mapping[str, Any]:
    members = _object(given, place)
    names = tuple(known)
    unknown = sorted(members.keys() - set(names))
    if unknown:
        raise ValueError(f"{place}: unknown member '{one_line(unknown[0])[:60]}'; known: {', '.join(names)}")
    return members


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the member '{one_line(twice)[:60]}' appears twice in one object")
    return found
