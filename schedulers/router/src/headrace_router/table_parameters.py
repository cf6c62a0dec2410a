"""The parameters ``scheduler.*`` of a router. They define its routing table.

============================  ========================================================================================
``scheduler.targets``         ``digits:1 = 90, digits:2 = 10``. The first is the baseline. Required
``scheduler.sticky``          ``header:x-user``, ``parameter:user`` or ``sequence``: equal values go to the same target
``scheduler.rules``           ``header:x-canary = yes -> digits:2; parameter:tier = beta -> digits:2``
``scheduler.shadow``          ``digits:3 = 0.1``: this model gets a copy of a tenth of the requests
``scheduler.rtol``            the relative tolerance between outputs of the shadow and the target; 0.001
``scheduler.atol``            the absolute tolerance; 0.00001
``scheduler.max_error_rate``  a target is rolled back if its error rate exceeds that of the baseline by more
``scheduler.max_p99_ratio``   a target is rolled back if its p99 over that of the baseline is greater
``scheduler.window_s``        the window of requests that count; 60
``scheduler.min_requests``    the requests in the window before a rollback; 100
============================  ========================================================================================

A target is ``model``, for its newest version, or ``model:3``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from headrace import ConfigError, Dependency, ModelConfig, Problem, one_line

if TYPE_CHECKING:
    from headrace_router.routing_table import RequestValue, RouteTarget, RoutingTable, Rule

T = TypeVar("T")

#: The largest weight. With a limit, sums and quotients of weights stay exact enough.
MAX_WEIGHT = 1_000_000
#: The most targets of one router. A request with a sticky key is hashed once per target.
MAX_TARGETS = 64
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
    shadow: str = ""
    rtol: str = ""
    atol: str = ""
    max_error_rate: str = ""
    max_p99_ratio: str = ""
    window_s: str = ""
    min_requests: str = ""


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
    from headrace_router.differences import Tolerance
    from headrace_router.rollback import RollbackRule
    from headrace_router.routing_table import RoutingTable

    parameters = {key: value.string_value for key, value in config.parameters.items() if key.startswith(_PREFIX)}

    def read(name: str, default: T, by: Callable[[_Parameter], T]) -> T:
        try:
            text = parameters.get(f"{_PREFIX}{name}")
            return default if text is None else by(_Parameter(config.name, name, text))
        except ConfigError as error:
            report(error)
            return default

    parameters.setdefault(f"{_PREFIX}targets", "")
    none: dict[RouteTarget, float] = {}
    weights = read("targets", none, _Parameter.targets)
    labels = [target.label for target in weights]
    rule, tolerance = RollbackRule(), Tolerance()
    return RoutingTable(
        list(weights),
        list(weights.values()),
        read("sticky", None, _Parameter.sticky),
        read("rules", (), lambda each: each.rules(labels)) if labels else (),
        read("shadow", None, _Parameter.shadow),
        Tolerance(
            read("rtol", tolerance.relative, lambda each: each.number(0, 1)),
            read("atol", tolerance.absolute, lambda each: each.number(0, 1e30)),
        ),
        RollbackRule(
            read("window_s", rule.window_s, lambda each: each.number(1, 86_400)),
            read("min_requests", rule.min_requests, lambda each: int(each.number(1, 1_000_000))),
            read("max_error_rate", None, lambda each: each.number(0, 1)),
            read("max_p99_ratio", None, lambda each: each.number(1, 1000)),
        ),
    )


def check_weights(weights: Mapping[str, Any], labels: Sequence[str]) -> list[float]:
    """Return ``weights`` in the order of ``labels``. Raises `ValueError`."""
    if unknown := [name for name in weights if name not in labels]:
        raise ValueError(f"'{shown(unknown[0])}' is no target; the targets are {', '.join(labels)}")
    if left_out := [label for label in labels if label not in weights]:
        raise ValueError(f"'{left_out[0]}' has no weight; give one for each of {', '.join(labels)}")
    found = [_weight(label, weights[label]) for label in labels]
    if not any(found):
        raise ValueError("all weights are 0; at least one must be above 0")
    return found


def check_fraction(value: Any) -> float:
    """Return ``value``, the fraction of requests that a shadow gets. Raises `ValueError`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"the fraction is {shown(json.dumps(value))}; expected a number from 0 to 1")
    return float(value)


def shown(text: str) -> str:
    """Return ``text`` of a caller as a short line."""
    line = one_line(text)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _weight(label: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MAX_WEIGHT:
        raise ValueError(
            f"the weight of '{label}' is {shown(json.dumps(value))}; expected a number from 0 to {MAX_WEIGHT:,}"
        )
    return float(value)


class _Parameter:
    """One parameter of a router. Its methods raise `ConfigError`."""

    def __init__(self, router: str, name: str, text: str) -> None:
        self._model, self._key, self._text = router, f"{_PREFIX}{name}", text

    def wrong(self, why: str) -> ConfigError:
        value = f"is '{shown(self._text)}'" if self._text else "is empty"
        return ConfigError(
            f"router '{self._model}': parameter '{self._key}' {value}: {why}", field=f"parameters[{self._key!r}]"
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
        if len(weights) > MAX_TARGETS:
            raise self.wrong(f"{len(weights)} targets; the limit is {MAX_TARGETS}")
        try:
            checked = check_weights(weights, list(weights))
        except ValueError as error:
            raise self.wrong(str(error)) from None
        return dict(zip(map(self._target, weights), checked, strict=True))

    def _target(self, label: str) -> RouteTarget:
        from headrace_router.routing_table import NEWEST, RouteTarget

        model, colon, version = label.rpartition(":")
        if colon and version.isascii() and version.isdigit() and len(version) < 19:
            found = RouteTarget(label, Dependency(model, int(version)))
        else:
            found = RouteTarget(label, Dependency(label, NEWEST))
        if not found.dependency.model:
            raise self.wrong(f"'{shown(label)}' names no model; expected 'model' or 'model:version'")
        if found.dependency.model == self._model:
            raise self.wrong(f"'{shown(label)}' is the router itself")
        return found

    def number(self, minimum: float, maximum: float) -> float:
        number = _number(self._text.strip())
        if not isinstance(number, float) or not minimum <= number <= maximum:
            raise self.wrong(f"expected a number from {minimum:,.15g} to {maximum:,.15g}")
        return number

    def shadow(self) -> tuple[RouteTarget, float]:
        label, equals, number = (piece.strip() for piece in self._text.partition("="))
        if not label or not equals:
            raise self.wrong("expected a model and the fraction of requests that it gets, such as 'digits:3 = 0.1'")
        try:
            return self._target(label), check_fraction(_number(number))
        except ValueError as error:
            raise self.wrong(str(error)) from None

    def sticky(self) -> RequestValue | None:
        from headrace_router.routing_table import RequestValue

        if self._text.strip() == "sequence":
            return RequestValue("sequence")
        return self._source(self._text.strip(), f"{_SOURCES} or 'sequence'")

    def rules(self, labels: Sequence[str]) -> Sequence[Rule]:
        return [self._rule(part.strip(), labels) for part in self._text.split(";")]

    def _rule(self, text: str, labels: Sequence[str]) -> Rule:
        from headrace_router.routing_table import Rule

        condition, arrow, label = (piece.strip() for piece in text.rpartition("->"))
        if not arrow:
            raise self.wrong(f"'{shown(text)}' is no rule, such as 'header:x-canary = yes -> digits:2'")
        if label not in labels:
            raise self.wrong(f"'{shown(label)}' is no target; the targets are {', '.join(labels)}")
        name, equals, value = (piece.strip() for piece in condition.partition("="))
        return Rule(self._source(name, _SOURCES), value if equals else None, labels.index(label))

    def _source(self, text: str, expected: str) -> RequestValue:
        from headrace_router.routing_table import RequestValue

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
