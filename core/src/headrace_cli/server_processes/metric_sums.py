"""One metrics page for several server processes (``--workers``): the sum of their measurements.

Counters: a counter of the page must not fall, because Prometheus would read that as a restart and count everything
again. If the counter of one server falls, that server or its model has restarted: its last value stays in the sum. The
last values of a server that has ended stay, too.

Gauges: the server's own gauges (waiting requests, instances, cache entries) are added up. Of load times the page has
the longest. Gauges made by models are not added up, because only their author knows what they mean: each server has its
own series, with the label ``headrace_worker``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client import Metric
from prometheus_client.samples import Sample

from headrace.telemetry.series import OWN

#: Gauges of which the page has the greatest value.
GREATEST: Final = frozenset(("nv_model_load_duration_secs",))

#: The labels of a sample, in their order.
Labels: TypeAlias = "tuple[tuple[str, str], ...]"
#: Counters that restart together: the samples of one family with the same labels, without ``le``.
Group: TypeAlias = "tuple[str, Labels]"


class FamilyHead(NamedTuple):
    """Name, help text and kind of a metric family."""

    name: str
    help: str
    kind: str


#: A family with its samples, each with its name and labels.
Family: TypeAlias = "tuple[FamilyHead, Sequence[tuple[str, Labels, float]]]"


def write_families(metrics: Iterable[Metric]) -> list[Any]:
    """Return ``metrics`` as values for JSON, without families that have no sample.

    JSON takes 0.7 s for 500 models in both directions. The library's parser takes 2 s to read their page.
    """
    return [
        [
            metric.name,
            metric.documentation,
            metric.type,
            [[each.name, each.labels, each.value] for each in metric.samples],
        ]
        for metric in metrics
        if metric.samples
    ]


def read_families(rows: Sequence[Any]) -> list[Family]:
    """Return the families that `write_families` wrote."""
    return [
        (
            FamilyHead(name, help_text, kind),
            [(sample, tuple(labels.items()), value) for sample, labels, value in samples],
        )
        for name, help_text, kind, samples in rows
    ]


class MetricSums:
    """Adds up the metrics of several sources. A source is the number of a server process."""

    def __init__(self) -> None:
        #: For each source: its last families, and its counters by group.
        self._read: dict[int, Sequence[Family]] = {}
        self._counted: dict[int, dict[Group, dict[tuple[str, Labels], float]]] = {}
        #: Sums of the counters of sources that have ended or restarted.
        self._before: dict[Group, dict[tuple[str, Labels], float]] = {}

    def read(self, source: int, families: Sequence[Family]) -> None:
        """Store ``families``, the current metrics of ``source``."""
        counted: dict[Group, dict[tuple[str, Labels], float]] = {}
        for head, samples in families:
            if head.kind != "gauge":
                for name, labels, value in samples:
                    counted.setdefault(_group(head, labels), {})[name, labels] = value
        for group, known in self._counted.get(source, {}).items():
            now = counted.get(group)
            if now is None or any(now.get(key, 0) < value for key, value in known.items()):
                self._add_before(group, known)
        self._read[source], self._counted[source] = families, counted
        self._forget()

    def ended(self, source: int) -> None:
        """Remove ``source``, which has ended; keep its counters in the sums."""
        self._read.pop(source, None)
        for group, known in self._counted.pop(source, {}).items():
            self._add_before(group, known)

    def collect(self) -> list[Metric]:
        """Return the families of all sources, added up."""
        by_name: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, Labels], float]] = {}
        for source, families in sorted(self._read.items()):
            for head, samples in families:
                by_name.setdefault(head.name, Metric(*head))
                sums = values.setdefault(head.name, {})
                for name, labels, value in samples:
                    if head.kind != "gauge":
                        key = name, labels
                        before = (
                            self._before.get(_group(head, labels), {}).get(key, 0) if key not in sums else sums[key]
                        )
                        sums[key] = before + value
                    elif head.name in GREATEST:
                        sums[name, labels] = max(sums.get((name, labels), value), value)
                    elif head.name.startswith(OWN):
                        sums[name, labels] = sums.get((name, labels), 0) + value
                    else:
                        sums[name, (*labels, ("headrace_worker", str(source)))] = value
        for name, sums in values.items():
            by_name[name].samples = [Sample(sample, dict(labels), value) for (sample, labels), value in sums.items()]
        return list(by_name.values())

    def _add_before(self, group: Group, known: Mapping[tuple[str, Labels], float]) -> None:
        totals = self._before.setdefault(group, {})
        for key, value in known.items():
            totals[key] = totals.get(key, 0) + value

    def _forget(self) -> None:
        """Remove the sums of series that no source has any more: their model is unloaded everywhere."""
        for group in [each for each in self._before if not any(each in counted for counted in self._counted.values())]:
            del self._before[group]


def _group(head: FamilyHead, labels: Labels) -> Group:
    return head.name, tuple(label for label in labels if label[0] != "le")
