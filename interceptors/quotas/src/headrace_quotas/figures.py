"""What principals use, for the metrics page: a bounded number of principals by name, all others together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from headrace import Measured, PublishedMetric, Publisher

#: The labels of principals without figures of their own, and of callers without a principal.
OTHER, ANONYMOUS = "other", "anonymous"
REASONS = ("rate", "in_flight", "bytes", "tokens", "queue_full", "waited")
_LABEL = "principal"

Labelled: TypeAlias = "tuple[dict[str, str], Publisher]"


class PrincipalFigures:
    """The counters of one label."""

    __slots__ = ("admitted", "input_bytes", "refused", "tokens", "waited_s")

    def __init__(self) -> None:
        self.admitted = self.input_bytes = self.tokens = 0
        self.waited_s = 0.0
        self.refused = dict.fromkeys(REASONS, 0)


class AllFigures:
    """The figures of each principal: of those in the quota file, and of the first others, up to ``most``."""

    def __init__(self, most: int, known: Iterable[str] = ()) -> None:
        self.by_label: dict[str, PrincipalFigures] = {}
        self._most = most
        for name in known:
            self.of(name)

    def of(self, principal: str) -> PrincipalFigures:
        """Return the figures of ``principal``; empty for a caller without one."""
        label = principal or ANONYMOUS
        if label not in self.by_label and label not in (OTHER, ANONYMOUS) and len(self.by_label) >= self._most:
            label = OTHER
        return self.by_label.setdefault(label, PrincipalFigures())

    def publishers(self, in_flight: Mapping[str, float], waiting: Mapping[str, float]) -> Iterator[Labelled]:
        """Yield the metrics. ``in_flight`` is by label, and ``waiting`` by model."""
        columns: list[tuple[str, str, Callable[[PrincipalFigures], float]]] = [
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
