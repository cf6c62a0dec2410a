"""Counters for the metrics page: by name for a limited number of principals, together for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from headrace import Measured, PublishedMetric, Publisher

#: The label of all principals without their own counters, and of callers without a principal.
OTHER, ANONYMOUS = "other", "anonymous"
REASONS = ("rate", "in_flight", "bytes", "tokens", "queue_full", "waited")
_LABEL = "principal"

Labelled: TypeAlias = "tuple[dict[str, str], Publisher]"


class Counters:
    """The counters of one label."""

    __slots__ = ("admitted", "input_bytes", "refused", "tokens", "waited_s")

    def __init__(self) -> None:
        self.admitted = self.input_bytes = self.tokens = 0
        self.waited_s = 0.0
        self.refused = dict.fromkeys(REASONS, 0)


class PrincipalCounters:
    """The counters of each principal: those in the quota file, then the first others, up to ``limit`` in all."""

    def __init__(self, limit: int, known: Iterable[str] = ()) -> None:
        self.by_label: dict[str, Counters] = {}
        self._limit = limit
        for name in known:
            self.of(name)

    def of(self, principal: str) -> Counters:
        """Return the counters of ``principal``, which is empty for a caller without one."""
        label = principal or ANONYMOUS
        if label not in self.by_label and label not in (OTHER, ANONYMOUS) and len(self.by_label) >= self._limit:
            label = OTHER
        return self.by_label.setdefault(label, Counters())

    def publishers(self, in_flight: Mapping[str, float], waiting: Mapping[str, float]) -> Iterator[Labelled]:
        """Yield the metrics. ``in_flight`` is by label, and ``waiting`` by model."""
        columns: list[tuple[str, str, Callable[[Counters], float]]] = [
            ("admitted_total", "Number of inferences admitted", lambda each: each.admitted),
            ("input_bytes_total", "Bytes of the admitted inferences as received", lambda each: each.input_bytes),
            ("output_tokens_total", "Output tokens that models report", lambda each: each.tokens),
            ("waited_seconds_total", "Seconds that inferences waited for their share", lambda each: each.waited_s),
        ]
        for name, text, read in columns:
            metric = PublishedMetric(f"headrace_quotas_{name}", text, "counter", _LABEL)
            yield {}, _Column(metric, {label: read(each) for label, each in self.by_label.items()})
        metric = PublishedMetric("headrace_quotas_in_flight", "Number of inferences in flight", label=_LABEL)
        yield {}, _Column(metric, {label: in_flight.get(label, 0) for label in self.by_label})
        metric = PublishedMetric("headrace_quotas_refused_total", "Number of inferences refused", "counter", _LABEL)
        for reason in REASONS:
            found = {label: each.refused[reason] for label, each in self.by_label.items() if each.refused[reason]}
            yield {"reason": reason}, _Column(metric, found)
        text = "Number of inferences that wait for their share of the model"
        yield {}, _Column(PublishedMetric("headrace_quotas_waiting", text, label="shared_model"), waiting)


class _Column:
    """One metric with its value for each label."""

    name = "quotas"

    def __init__(self, metric: PublishedMetric, values: Mapping[str, float]) -> None:
        self.metrics, self._values = (metric,), values

    def measure(self) -> Mapping[str, Measured]:
        return {self.metrics[0].name: self._values}
