"""The metrics of a router, and its state as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import TYPE_CHECKING, Any, Final

from headrace import Measured, PublishedMetric

if TYPE_CHECKING:
    from headrace_router.decisions import Decider
    from headrace_router.destination import Destination
    from headrace_router.rollback import RollbackRule
    from headrace_router.shadow import Shadow

REQUESTS: Final = "headrace_router_requests_total"
ERRORS: Final = "headrace_router_errors_total"
DECISIONS: Final = "headrace_router_decisions_total"
WEIGHT: Final = "headrace_router_weight"
ROLLBACKS: Final = "headrace_router_rollbacks_total"
COPIES: Final = "headrace_router_shadow_requests_total"
ELEMENTS: Final = "headrace_router_shadow_elements_total"
BEYOND: Final = "headrace_router_shadow_beyond_tolerance_total"
RELATIVE: Final = "headrace_router_shadow_relative_difference_total"
LARGEST: Final = "headrace_router_shadow_largest_difference"

#: Each has one label, whose values are in the config: targets, outputs; or the reasons and outcomes that there are.
METRICS: Final = (
    PublishedMetric(REQUESTS, "Requests that a target has answered.", "counter", label="target"),
    PublishedMetric(ERRORS, "Requests that a target has answered by an error.", "counter", label="target"),
    PublishedMetric(DECISIONS, "Requests by what has decided about the target.", "counter", label="by"),
    PublishedMetric(WEIGHT, "The weight of a target; its share is this over the sum of all.", label="target"),
    PublishedMetric(ROLLBACKS, "How often a target was rolled back.", "counter", label="target"),
    PublishedMetric(COPIES, "Copies of requests for the shadow, by what became of them.", "counter", label="outcome"),
    PublishedMetric(ELEMENTS, "Elements of an output that were compared.", "counter", label="output"),
    PublishedMetric(BEYOND, "Elements that differ by more than the tolerance.", "counter", label="output"),
    PublishedMetric(RELATIVE, "The sum of the relative differences of all elements.", "counter", label="output"),
    PublishedMetric(LARGEST, "The largest absolute difference of an element.", label="output"),
)


def measure(destinations: Sequence[Destination], decider: Decider, shadow: Shadow | None) -> Mapping[str, Measured]:
    """Return the values of `METRICS` of one router."""
    differences = {} if shadow is None else shadow.differences
    return {
        REQUESTS: {each.label: each.requests for each in destinations},
        ERRORS: {each.label: each.errors for each in destinations},
        DECISIONS: dict(decider.counts),
        WEIGHT: dict(zip(decider.table.labels, decider.weights, strict=True)),
        ROLLBACKS: {each.label: each.rollbacks for each in destinations},
        COPIES: {} if shadow is None else dict(shadow.outcomes),
        ELEMENTS: {name: each.elements for name, each in differences.items()},
        BEYOND: {name: each.beyond for name, each in differences.items()},
        RELATIVE: {name: each.relative for name, each in differences.items()},
        LARGEST: {name: each.largest for name, each in differences.items()},
    }


def status(destinations: Sequence[Destination], decider: Decider, shadow: Shadow | None, now_ns: int) -> dict[str, Any]:
    """Return the targets with their weights and counts, the shadow and the rule, as JSON."""
    weights, table = decider.weights, decider.table
    total = fsum(weights)
    rule = table.rollback
    return {
        "targets": [
            {
                "name": each.label,
                "weight": weight,
                "share": round(weight / total, 6),
                **each.status(now_ns),
                "rolled_back": decider.rolled_back.get(each.label),
            }
            for each, weight in zip(destinations, weights, strict=True)
        ],
        "decided_by": dict(decider.counts),
        "sticky": None if table.sticky is None else str(table.sticky),
        "rules": [
            f"{each.source}{'' if each.value is None else f' = {each.value}'} -> {table.labels[each.target]}"
            for each in table.rules
        ],
        "window_s": rule.window_s,
        "rollback": _rule(rule) if rule.is_on else None,
        "shadow": None if shadow is None else shadow.status(),
    }


def _rule(rule: RollbackRule) -> dict[str, Any]:
    names = ("min_requests", "max_error_rate", "max_p99_ratio")
    return {name: getattr(rule, name) for name in names}
