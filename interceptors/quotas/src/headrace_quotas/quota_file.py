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

#: A larger file is refused. 10,000 principals with their own limits take about 1 MB.
_MAX_BYTES = 64 << 20
_MAX_CHARACTERS = 256
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

    A burst of None is the rate for 1 s (requests, bytes) or 1 min (tokens), at least 1.
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
        """Return the share of each of ``workers`` servers, which count separately. ``in_flight`` is rounded up."""
        rates = {name: getattr(self, name) for name in _BURSTS}
        bursts = {name: getattr(self, name) for name in _BURSTS.values()}
        return QuotaLimits(
            in_flight=None if self.in_flight is None else ceil(self.in_flight / workers),
            **{name: None if value is None else value / workers for name, value in rates.items()},
            **{name: None if value is None else max(1.0, value / workers) for name, value in bursts.items()},
        )


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one principal: ``limits`` for all models together, ``models`` for each pattern of models.

    ``place`` is the member of the file.
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
    """The sharing of a model. If ``in_flight`` is 0, as many requests are admitted as fill its instances."""

    in_flight: int = 0
    max_waiting: int = 1000
    max_waiting_bytes: int = 256 << 20
    max_wait_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class QuotaBook:
    """The quotas of all principals. ``anonymous`` is the quota of each address of callers without a principal."""

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
        """Return the share of each of ``workers`` servers."""

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
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"quota file '{path}' has {len(content)} bytes; the limit is {_MAX_BYTES}")
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
    sections = _members(document, "the file", ("defaults", "principals", "anonymous", "sharing"))
    defaults = _quota(sections.get("defaults", {}), "defaults", Quota())
    quotas = {
        name: _quota(each, f"principals.{one_line(name)}", defaults)
        for name, each in _object(sections.get("principals", {}), "principals").items()
        if _is_name(name, "principals")
    }
    sharing = [
        (pattern, _sharing(each, f"sharing.{one_line(pattern)}"))
        for pattern, each in _object(sections.get("sharing", {}), "sharing").items()
        if _is_name(pattern, "sharing")
    ]
    return QuotaBook(
        defaults,
        {name: quota for name, quota in quotas.items() if not is_pattern(name)},
        tuple((name, quota) for name, quota in quotas.items() if is_pattern(name)),
        _quota(sections.get("anonymous", {}), "anonymous", defaults),
        tuple(sharing),
    )


def _quota(value: Any, place: str, defaults: Quota) -> Quota:
    """Return the quota in ``value``, completed with the limits of ``defaults``."""
    members = dict(_members(value, place, (*_names(QuotaLimits), "weight", "models")))
    weight = _number(members.pop("weight", defaults.weight), f"{place}.weight", 0.001, 1000)
    models = [
        (pattern, _limits(each, f"{place}.models.{one_line(pattern)}", QuotaLimits()))
        for pattern, each in _object(members.pop("models", {}), f"{place}.models").items()
        if _is_name(pattern, f"{place}.models")
    ]
    return Quota(_limits(members, place, defaults.limits), weight, (*models, *defaults.models), place)


def _limits(value: Any, place: str, defaults: QuotaLimits) -> QuotaLimits:
    members = _members(value, place, _names(QuotaLimits))
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
            values.pop(burst, None)  # the default burst belongs to the default rate
    return QuotaLimits(**values)


def _sharing(value: Any, place: str) -> Sharing:
    readers: dict[str, Callable[[Any, str], Any]] = {
        "in_flight": _integer,
        "max_waiting": _integer,
        "max_waiting_bytes": _integer,
        "max_wait_seconds": lambda value, where: _number(value, where, 0.001, 86_400),
    }
    members = _members(value, place, readers)
    return Sharing(**{name: readers[name](value, f"{place}.{name}") for name, value in members.items()})


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def _number(value: Any, place: str, minimum: float, maximum: float = _LARGEST) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise ValueError(f"{place} is {_as_text(value)}; expected a number from {minimum:g} to {maximum:g}")
    return float(value)


def _integer(value: Any, place: str, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _LARGEST:
        raise ValueError(f"{place} is {_as_text(value)}; expected a whole number from {minimum} to {_LARGEST:g}")
    return value


def _as_text(value: Any) -> str:
    return one_line(json.dumps(value))[:60]


def _is_name(name: str, place: str) -> bool:
    if not name or len(name) > _MAX_CHARACTERS:
        raise ValueError(f"{place}: a name or pattern has 1 to {_MAX_CHARACTERS} characters, not {len(name)}")
    return True


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {_as_text(value)}; expected an object")
    return value


def _members(value: Any, place: str, known: Iterable[str]) -> Mapping[str, Any]:
    members = _object(value, place)
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
