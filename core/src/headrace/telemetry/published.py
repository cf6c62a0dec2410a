"""Metrics that plugins publish: a part declares them, and is asked when the metrics page is. Event loop only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.telemetry.pacing import paced

log = paced(__name__)

#: Labels of which no two publishers of a page have the same together with the same metric.
PublisherLabels: TypeAlias = dict[str, str]

_NAME = re.compile(r"headrace_[a-z0-9_]*[a-z0-9]")


@dataclass(frozen=True, slots=True)
class PublishedMetric:
    """A number that a part has on the metrics page: as it is now, or, if it is a ``counter``, counted since the part
    was made.

    ``name`` begins with ``headrace_``, as no metric of a model may, and goes on with what the part is called; that of a
    counter ends in ``_total``, so that two parts with one name have one kind. Raises `ValueError` for any other.
    """

    name: str
    help: str
    kind: Literal["gauge", "counter"] = "gauge"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"metric {self.name!r}: a name begins with 'headrace_' and has small letters, digits and '_' only"
            )
        if self.kind not in ("gauge", "counter"):
            raise ValueError(f"metric '{self.name}' is of kind {self.kind!r}, expected 'gauge' or 'counter'")
        if self.name.endswith("_total") != (self.kind == "counter"):
            raise ValueError(
                f"metric '{self.name}' is a {self.kind}; the name of a counter, and no other, ends in _total"
            )


class Publisher(Protocol):
    """A part that has metrics."""

    @property
    def name(self) -> str: ...

    @property
    def metrics(self) -> Sequence[PublishedMetric]: ...

    def measure(self) -> Mapping[str, float]: ...


def read_metrics(part: Publisher) -> list[tuple[PublishedMetric, float]]:
    """What each of the metrics of ``part`` is now. Raises what it raises, and `ValueError` if it does not keep to what
    it has declared."""
    metrics = part.metrics
    if not metrics:
        return []
    said, declared = part.measure(), [metric.name for metric in metrics]
    if sorted(said) != sorted(declared):
        raise ValueError(f"it measures {sorted(said)}, and has declared {sorted(declared)}")
    return [(metric, float(said[metric.name])) for metric in metrics]


class PublishedMetrics(Collector):
    """What the parts publish that ``parts`` gives. One that fails is left out, and the log says so once until it works
    again: the page is everybody's."""

    def __init__(self, parts: Callable[[], Iterable[tuple[PublisherLabels, Publisher]]]) -> None:
        self._parts = parts
        #: Which failed when the page was last asked for.
        self._failing: frozenset[object] = frozenset()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        failing = set()
        for labels, part in self._parts():
            try:
                _add(families, labels, read_metrics(part))
            except KeyboardInterrupt:
                raise
            except BaseException:  # a stranger's
                failed = type(part), *labels.values()
                failing.add(failed)
                if failed not in self._failing:
                    whose = f"'{part.name}' of {labels or 'the server'}"
                    log.exception("the metrics of %s could not be read, and are left out of the page", whose)
        self._failing = frozenset(failing)
        yield from families.values()


def _add(families: dict[str, Metric], labels: PublisherLabels, read: Sequence[tuple[PublishedMetric, float]]) -> None:
    for metric, value in read:
        family = families.setdefault(metric.name, Metric(metric.name, metric.help, metric.kind))
        family.samples.append(Sample(metric.name, labels, value))
