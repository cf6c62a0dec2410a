"""Metrics that plugins publish. A part declares them, and each scrape of the page reads them. Event loop only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.telemetry.log_limits import rate_limited_logger

log = rate_limited_logger(__name__)

#: The labels of one publisher. No two publishers of the same metric may have the same labels.
PublisherLabels: TypeAlias = dict[str, str]
#: The value of a metric. If the metric has a label, the number for each value of the label.
Measured: TypeAlias = "float | Mapping[str, float]"

_NAME = re.compile(r"headrace_[a-z0-9_]*[a-z0-9]")
_LABEL = re.compile(r"([a-z][a-z0-9_]*)?")
#: The labels that the server adds.
_TAKEN = ("model", "version", "headrace_worker")


@dataclass(frozen=True, slots=True)
class PublishedMetric:
    """A number of a part on the metrics page: a ``gauge``, or a ``counter`` that starts when the part is made.

    ``name`` is ``headrace_``, the name of the part, and the name of the number; no metric of a model may begin so. The
    name of a counter ends in ``_total``, that of a gauge does not, so that equal names have equal kinds. A metric with
    a ``label`` has one number for each value of it, of which there must be few. Raises `ValueError` for another name,
    kind or label.
    """

    name: str
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    label: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"metric {self.name!r}: a name begins with 'headrace_' and has only small letters, digits and '_'"
            )
        if self.kind not in ("gauge", "counter"):
            raise ValueError(f"metric '{self.name}' is of kind {self.kind!r}, expected 'gauge' or 'counter'")
        if self.name.endswith("_total") != (self.kind == "counter"):
            raise ValueError(
                f"metric '{self.name}' is a {self.kind}; the name of a counter, and only of a counter, ends in _total"
            )
        if self.label in _TAKEN or not _LABEL.fullmatch(self.label):
            raise ValueError(
                f"metric '{self.name}' has the label {self.label!r}: a label has only small letters, digits and '_', "
                f"and the server adds {', '.join(_TAKEN)}"
            )

    def checked(self, value: Measured) -> Measured:
        """Return ``value`` as floats. Raises `ValueError` if it has labels and the metric has none, or the reverse."""
        if isinstance(value, Mapping) != bool(self.label):
            raise ValueError(f"metric '{self.name}' has the label {self.label!r}, and measures {value!r}")
        return {each: float(number) for each, number in value.items()} if isinstance(value, Mapping) else float(value)


class Publisher(Protocol):
    """A part that has metrics."""

    @property
    def name(self) -> str: ...

    @property
    def metrics(self) -> Sequence[PublishedMetric]: ...

    def measure(self) -> Mapping[str, Measured]: ...


def read_metrics(part: Publisher) -> list[tuple[PublishedMetric, Measured]]:
    """Return the metrics of ``part`` with their current values.

    Raises what ``part.measure`` raises, and `ValueError` if it returns other names or labels than ``part.metrics``
    declares.
    """
    metrics = part.metrics
    if not metrics:
        return []
    measured, declared = part.measure(), [metric.name for metric in metrics]
    if sorted(measured) != sorted(declared):
        raise ValueError(f"it measures {sorted(measured)}, but has declared {sorted(declared)}")
    return [(metric, metric.checked(measured[metric.name])) for metric in metrics]


class PublishedMetrics(Collector):
    """Collects the metrics of the parts that ``parts`` returns.

    A part that fails is left out, so that the rest of the page stays readable. It is logged once, and again only after
    it has worked in between.
    """

    def __init__(self, parts: Callable[[], Iterable[tuple[PublisherLabels, Publisher]]]) -> None:
        self._parts = parts
        #: The parts that failed in the last collection.
        self._failing: frozenset[object] = frozenset()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        failing = set()
        for labels, part in self._parts():
            try:
                _add(families, labels, read_metrics(part))
            except KeyboardInterrupt:
                raise
            except BaseException:  # code of a plugin may raise anything
                failed = type(part), *labels.values()
                failing.add(failed)
                if failed not in self._failing:
                    whose = f"'{part.name}' of {labels or 'the server'}"
                    log.exception("the metrics of %s could not be read and are left out of the page", whose)
        self._failing = frozenset(failing)
        yield from families.values()


def _add(
    families: dict[str, Metric], labels: PublisherLabels, read: Sequence[tuple[PublishedMetric, Measured]]
) -> None:
    for metric, value in read:
        family = families.setdefault(metric.name, Metric(metric.name, metric.help, metric.kind))
        if isinstance(value, Mapping):
            family.samples += [Sample(metric.name, {**labels, metric.label: key}, value[key]) for key in value]
        else:
            family.samples.append(Sample(metric.name, labels, value))
