"""Prometheus text, exactly as Triton prints it (docs/spec/behaviours.md section 7.8).

prometheus-client collects, but its own writer puts ``_total`` behind the name of every counter,
prints ``3.0`` for 3 and sorts ``le`` and ``quantile`` among the other labels. Dashboards, and
scripts that read lines, know Triton's form: names as they are, whole numbers without a point, the
label that tells the buckets apart last, ``_count`` and ``_sum`` before the buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric

CONTENT_TYPE = "text/plain; charset=utf-8"


def text(families: Iterable[Metric]) -> str:
    """The families that have samples, in text exposition format 0.0.4."""
    return "".join(line for family in families if family.samples for line in _lines(family))


def _lines(family: Metric) -> Iterator[str]:
    samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    # A counter of prometheus-client carries `_total` in its samples and not in its name.
    name = samples[0].name if family.type == "counter" else family.name
    kind = "untyped" if family.type == "unknown" else family.type
    yield f"# HELP {name} {_escape(family.documentation)}\n"
    yield f"# TYPE {name} {kind}\n"
    for sample in samples:
        yield f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = [f'{name}="{_escape(value, quoted=True)}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}"


def _escape(value: str, quoted: bool = False) -> str:
    value = value.replace("\\", r"\\").replace("\n", r"\n")
    return value.replace('"', r"\"") if quoted else value


def _number(value: float) -> str:
    """16 significant digits, as prometheus-cpp; its spellings of what is no number, too."""
    if isinstance(value, int):
        return str(value)
    if value != value:
        return "Nan"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return format(value, ".16g")
