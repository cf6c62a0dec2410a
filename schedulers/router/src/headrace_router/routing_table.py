"""The routing table of a router: its model's parameters ``scheduler.*``, read and checked.

==========================  ==========================================================================================
``scheduler.targets``       ``digits:1 = 90, digits:2 = 10``. The first is the baseline. Required
``scheduler.sticky``        ``header:x-user``, ``parameter:user`` or ``sequence``: equal values go to the same target
``scheduler.rules``         ``header:x-canary = yes -> digits:2; parameter:tier = beta -> digits:2``
==========================  ==========================================================================================

A target is ``model``, for its newest version, or ``model:3``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace import ConfigError, Dependency, ModelConfig, Problem, one_line

#: The largest weight. With a limit, sums and quotients of weights stay exact enough.
MOST_WEIGHT = 1_000_000
#: The most targets of one router. A request with a sticky key is hashed once per target.
MOST_TARGETS = 64
_NEWEST = -1
#: The longest piece of a wrong value that an error shows.
_SHOWN = 60
_PREFIX = "scheduler."
_SOURCES = "'header:<name>' or 'parameter:<name>'"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, slots=True)
class RouterParameters:
    """The parameters ``scheduler.*`` as they are written. See the module."""

    targets: str = ""
    sticky: str = ""
    rules: str = ""


@dataclass(frozen=True, slots=True)
class RouteTarget:
    """A model that answers for the router. ``label`` is its name as written, such as ``digits:2``."""

    label: str
    dependency: Dependency

    @property
    def version(self) -> str:
        """The version as requests name it; empty for the newest."""
        return "" if self.dependency.version == _NEWEST else str(self.dependency.version)


@dataclass(frozen=True, slots=True)
class RequestValue:
    """Where a value of a request comes from: ``kind`` is ``header``, ``parameter`` or ``sequence``."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests whose ``source`` has ``value`` go to the target of the index ``target``. None is any value."""

    source: RequestValue
    value: str | None
    target: int


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """A checked routing table. ``weights`` are in the order of ``targets``, of which the first is the baseline."""

    targets: Sequence[RouteTarget]
    weights: Sequence[float]
    sticky: RequestValue | None = None
    rules: Sequence[Rule] = field(default=())

    @property
    def labels(self) -> list[str]:
        return [target.label for target in self.targets]

    @property
    def reads_headers(self) -> bool:
        """True if a decision depends on a header."""
        sources = [rule.source for rule in self.rules] + ([self.sticky] if self.sticky else [])
        return any(source.kind == "header" for source in sources)


def read_table(config: ModelConfig) -> RoutingTable:
    """Return the routing table of ``config``. Raises `ConfigError` that names parameter, value and rule."""
    wrong: list[ConfigError] = []
    table = _read(config, wrong.append)
    for error in wrong:
        raise error
    return table


def table_problems(config: ModelConfig) -> list[Problem]:
    """Return everything for which `read_table` raises, one problem for each parameter."""
    wrong: list[ConfigError] = []
    _read(config, wrong.append)
    return [Problem(error.field, error.message, error.code) for error in wrong]


def _read(config: ModelConfig, report: Callable[[ConfigError], None]) -> RoutingTable:
    """Return the routing table, without the parameters that are wrong: these are reported."""
    given = {key: value.string_value for key, value in config.parameters.items() if key.startswith(_PREFIX)}
    weights: dict[RouteTarget, float] = {}
    sticky: RequestValue | None = None
    rules: Sequence[Rule] = ()
    try:
        weights = _Parameter(config, "targets", given.get(f"{_PREFIX}targets", "")).targets()
    except ConfigError as error:
        report(error)
    labels = [target.label for target in weights]
    try:
        if (text := given.get(f"{_PREFIX}sticky")) is not None:
            sticky = _Parameter(config, "sticky", text).sticky()
    except ConfigError as error:
        report(error)
    try:
        if labels and (text := given.get(f"{_PREFIX}rules")) is not None:
            rules = _Parameter(config, "rules", text).rules(labels)
    except ConfigError as error:
        report(error)
    return RoutingTable(list(weights), list(weights.values()), sticky, rules)


def check_weights(weights: Mapping[str, Any], labels: Sequence[str]) -> list[float]:
    """Return ``weights`` in the order of ``labels``. Raises `ValueError` that says what is wrong."""
    if unknown := [name for name in weights if name not in labels]:
        raise ValueError(f"'{shown(unknown[0])}' is no target; the targets are {', '.join(labels)}")
    if left_out := [label for label in labels if label not in weights]:
        raise ValueError(f"'{left_out[0]}' has no weight; give one for each of {', '.join(labels)}")
    found = [_weight(label, weights[label]) for label in labels]
    if not any(found):
        raise ValueError("all weights are 0; at least one must be above 0")
    return found


def shown(text: str) -> str:
    """Return ``text`` of a caller as a short line."""
    line = one_line(text)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _weight(label: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MOST_WEIGHT:
        raise ValueError(
            f"the weight of '{label}' is {shown(json.dumps(value))}; expected a number from 0 to {MOST_WEIGHT:,}"
        )
    return float(value)


class _Parameter:
    """One parameter of ``config``. Its methods raise `ConfigError`."""

    def __init__(self, config: ModelConfig, name: str, text: str) -> None:
        self._model, self._key, self._text = config.name, f"{_PREFIX}{name}", text

    def wrong(self, why: str) -> ConfigError:
        said = f"is '{shown(self._text)}'" if self._text else "is empty"
        return ConfigError(
            f"router '{self._model}': parameter '{self._key}' {said}: {why}", field=f"parameters[{self._key!r}]"
        )

    def targets(self) -> dict[RouteTarget, float]:
        """Return the weight of each target, the baseline first."""
        if not self._text.strip():
            raise self.wrong("expected targets with their weights, such as 'digits:1 = 90, digits:2 = 10'")
        weights: dict[str, Any] = {}
        for part in self._text.split(","):
            label, equals, number = (piece.strip() for piece in part.partition("="))
            if not label or not equals:
                raise self.wrong(f"'{shown(part.strip())}' is no target with its weight, such as 'digits:2 = 10'")
            if label in weights:
                raise self.wrong(f"'{shown(label)}' is named twice")
            weights[label] = _number(number)
        if len(weights) > MOST_TARGETS:
            raise self.wrong(f"{len(weights)} targets; the limit is {MOST_TARGETS}")
        try:
            checked = check_weights(weights, list(weights))
        except ValueError as error:
            raise self.wrong(str(error)) from None
        return dict(zip(map(self._target, weights), checked, strict=True))

    def _target(self, label: str) -> RouteTarget:
        model, colon, version = label.rpartition(":")
        if colon and version.isascii() and version.isdigit() and len(version) < 19:
            found = RouteTarget(label, Dependency(model, int(version)))
        else:
            found = RouteTarget(label, Dependency(label, _NEWEST))
        if not found.dependency.model:
            raise self.wrong(f"'{shown(label)}' names no model; expected 'model' or 'model:version'")
        if found.dependency.model == self._model:
            raise self.wrong(f"'{shown(label)}' is the router itself")
        return found

    def sticky(self) -> RequestValue:
        if self._text.strip() == "sequence":
            return RequestValue("sequence")
        return self._source(self._text.strip(), f"{_SOURCES} or 'sequence'")

    def rules(self, labels: Sequence[str]) -> list[Rule]:
        return [self._rule(part.strip(), labels) for part in self._text.split(";")]

    def _rule(self, text: str, labels: Sequence[str]) -> Rule:
        condition, arrow, label = (piece.strip() for piece in text.rpartition("->"))
        if not arrow:
            raise self.wrong(f"'{shown(text)}' is no rule, such as 'header:x-canary = yes -> digits:2'")
        if label not in labels:
            raise self.wrong(f"'{shown(label)}' is no target; the targets are {', '.join(labels)}")
        name, equals, value = (piece.strip() for piece in condition.partition("="))
        return Rule(self._source(name, _SOURCES), value if equals else None, labels.index(label))

    def _source(self, text: str, expected: str) -> RequestValue:
        kind, _, name = (piece.strip() for piece in text.partition(":"))
        if kind not in ("header", "parameter") or not name:
            raise self.wrong(f"'{shown(text)}' names no place in a request; expected {expected}")
        if kind == "header" and not _TOKEN.fullmatch(name):
            raise self.wrong(f"'{shown(name)}' is no name of a header")
        return RequestValue(kind, name.lower() if kind == "header" else name)


def _number(text: str) -> float | str:
    """Return the number in ``text``, or ``text`` if it is none: the check of the weights shows it."""
    try:
        return float(text)
    except ValueError:
        return text or math.nan
