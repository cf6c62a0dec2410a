"""What ``--metrics-config`` asks for, and Prometheus text exactly as Triton prints it.

Source: docs/spec/behaviours.md sections 7.5 and 7.8.

prometheus-client collects, but its own writer puts ``_total`` behind the name of every counter,
prints ``3.0`` for 3 and sorts ``le`` and ``quantile`` among the other labels. Dashboards, and
scripts that read lines, know Triton's format: names as they are, whole numbers without a point, the
label that tells the buckets apart last, ``_count`` and ``_sum`` before the buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric

from headrace.errors import ConfigError

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


DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Which of the latency families are exported. Settings not named here are accepted, and
    ignored, as Triton does."""

    counter_latencies: bool = True
    summary_latencies: bool = False
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES


def parse_metrics_config(config: Mapping[str, str]) -> MetricsSettings:
    """The settings of ``--metrics-config``; values other than "true" and "false" change nothing.

    Raises `ConfigError` naming the quantile that is none.
    """
    return MetricsSettings(
        counter_latencies=config.get("counter_latencies") != "false",
        summary_latencies=config.get("summary_latencies") == "true",
        quantiles=_quantiles(config["summary_quantiles"]) if "summary_quantiles" in config else DEFAULT_QUANTILES,
    )


def _quantiles(setting: str) -> tuple[float, ...]:
    """``q:error,q:error``. The error is checked and not used: see `headrace.telemetry.summaries`."""
    return tuple(_quantile(pair) for pair in setting.split(","))


def _quantile(pair: str) -> float:
    rule = f"--metrics-config: summary_quantiles has '{pair}' where <quantile>:<error>, both in [0, 1], is expected"
    quantile, colon, error = pair.partition(":")
    try:
        value, tolerance = float(quantile), float(error)
    except ValueError:
        raise ConfigError(rule) from None
    if not colon or not 0 <= value <= 1 or not 0 <= tolerance <= 1:
        raise ConfigError(rule)
    return value
