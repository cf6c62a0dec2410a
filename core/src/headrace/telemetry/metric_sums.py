"""One metrics page of several servers: what each has measured, added up.

A counter of the page never falls while its series is there, whatever becomes of the servers that counted: Prometheus
would take that for a restart, and count everything once more. So each server's counters are looked at as Prometheus
looks at them: where one falls, its server (or the model in it) has begun anew, and what it had counted until then stays
in the sum; and so does what a server had counted that has ended.

Gauges of the server's own are added up: requests that wait, instances, entries of a cache. Of load times the longest
counts. A gauge that a model has made may be anything, a temperature or a share: nobody but its author knows how to add
it up, and each server's has a series of its own with the label ``headrace_worker``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client import Metric
from prometheus_client.samples import Sample

from headrace.telemetry.custom import OWN

#: Gauges of which the greatest counts.
GREATEST: Final = frozenset(("nv_model_load_duration_secs",))

#: The labels of a sample, in their order.
Labels: TypeAlias = "tuple[tuple[str, str], ...]"
#: What falls together when a server begins anew: the samples of one family with the same labels, ``le`` left out.
Group: TypeAlias = "tuple[str, Labels]"


class FamilyHead(NamedTuple):
    """What a family of metrics says of itself."""

    name: str
    help: str
    kind: str


#: A family with its samples, each with its name and labels.
Family: TypeAlias = "tuple[FamilyHead, Sequence[tuple[str, Labels, float]]]"


def write_families(metrics: Iterable[Metric]) -> list[Any]:
    """``metrics`` as JSON has them, without those that have no sample."""
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


def read_families(found: Sequence[Any]) -> list[Family]:
    """What `write_families` wrote."""
    return [
        (
            FamilyHead(name, help_text, kind),
            [(sample, tuple(labels.items()), value) for sample, labels, value in samples],
        )
        for name, help_text, kind, samples in found
    ]


class MetricSums:
    """The sums over sources, which are numbers of servers."""

    def __init__(self) -> None:
        #: By source: its families as last read, and its counters by group.
        self._read: dict[int, Sequence[Family]] = {}
        self._counted: dict[int, dict[Group, dict[tuple[str, Labels], float]]] = {}
        #: What was counted by those that have ended, or have begun anew.
        self._before: dict[Group, dict[tuple[str, Labels], float]] = {}

    def read(self, source: int, families: Sequence[Family]) -> None:
        """``source`` has measured ``families`` by now."""
        counted: dict[Group, dict[tuple[str, Labels], float]] = {}
        for head, samples in families:
            if head.kind != "gauge":
                for name, labels, value in samples:
                    counted.setdefault(_group(head, labels), {})[name, labels] = value
        for group, known in self._counted.get(source, {}).items():
            now = counted.get(group)
            if now is None or any(now.get(key, 0) < value for key, value in known.items()):
                self._keep(group, known)
        self._read[source], self._counted[source] = families, counted
        self._forget()

    def ended(self, source: int) -> None:
        """``source`` is no more; what it has counted stays."""
        self._read.pop(source, None)
        for group, known in self._counted.pop(source, {}).items():
            self._keep(group, known)

    def collect(self) -> list[Metric]:
        """The families of all sources, as Prometheus has them."""
        found: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, Labels], float]] = {}
        for source, families in sorted(self._read.items()):
            for head, samples in families:
                found.setdefault(head.name, Metric(*head))
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
            found[name].samples = [Sample(sample, dict(labels), value) for (sample, labels), value in sums.items()]
        return list(found.values())

    def _keep(self, group: Group, known: Mapping[tuple[str, Labels], float]) -> None:
        kept = self._before.setdefault(group, {})
        for key, value in known.items():
            kept[key] = kept.get(key, 0) + value

    def _forget(self) -> None:
        """Drop what belongs to series that nobody has any more: its model has been unloaded everywhere."""
        for group in [each for each in self._before if not any(each in counted for counted in self._counted.values())]:
            del self._before[group]


def _group(head: FamilyHead, labels: Labels) -> Group:
    return head.name, tuple(label for label in labels if label[0] != "le")
