"""Settings of ``--metrics-config``, and Prometheus text exactly as Triton prints it.

Source: docs/spec/behaviours.md sections 7.5 and 7.8.

prometheus-client collects the families, but does not write them: its ``generate_latest`` appends ``_total`` to the name
of every counter in ``# HELP`` and ``# TYPE``, so that Prometheus finds no type for Triton's names. It also prints
``3.0`` for 3 and sorts ``le`` and ``quantile`` among the other labels, and it takes 0.65 s for the 61,000 lines of 500
models, on which `text` spends 0.24 s.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric

CONTENT_TYPE = "text/plain; charset=utf-8"


def text(families: Iterable[Metric]) -> str:
    """Return the families that have samples, in text exposition format 0.0.4."""
    return "".join(line for family in families if family.samples for line in _lines(family))


def _lines(family: Metric) -> Iterator[str]:
    kind = "untyped" if family.type == "unknown" else family.type
    yield f"# HELP {family.name} {_escape(family.documentation)}\n"
    yield f"# TYPE {family.name} {kind}\n"
    for sample in family.samples:
        yield f"{sample.name}{_labels(sample.labels)} {number(sample.value)}\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = [f'{name}="{_escape(value, quoted=True)}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}"


def _escape(value: str, quoted: bool = False) -> str:
    value = value.replace("\\", r"\\").replace("\n", r"\n")
    return value.replace('"', r"\"") if quoted else value


def number(value: float) -> str:
    """Return ``value`` with 16 significant digits, and NaN and the infinities, as prometheus-cpp writes them."""
    if isinstance(value, int):
        return str(value)
    if value != value:
        return "Nan"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return format(value, ".16g")


log = logging.getLogger("headrace.metrics")

_DECIMAL = re.compile(r"[+-]?(?:inf(?:inity)?|nan|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)", re.IGNORECASE)
_HEXADECIMAL = re.compile(r"[+-]?0x(?:[0-9a-f]+(?:\.[0-9a-f]*)?|\.[0-9a-f]+)(?:p[+-]?[0-9]+)?", re.IGNORECASE)

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Which latency families are exported. Other settings are accepted and ignored, as in Triton."""

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES
    #: The four histograms that only Headrace has.
    histograms: bool = True


def parse_metrics_config(config: Mapping[str, str]) -> MetricsSettings:
    """Return the settings of ``--metrics-config``; values other than "true" and "false" change nothing.

    As in Triton, a part of ``summary_quantiles`` that is not a pair of numbers is logged and ignored. If no part is
    valid, the default quantiles are used.
    """
    return MetricsSettings(
        counter_latencies=config.get("counter_latencies") != "false",
        histogram_latencies=config.get("histogram_latencies") == "true",
        summary_latencies=config.get("summary_latencies") == "true",
        quantiles=tuple(_quantiles(config.get("summary_quantiles", ""))) or DEFAULT_QUANTILES,
        histograms=config.get("histograms") != "false",
    )


def _quantiles(setting: str) -> Iterator[float]:
    """Yield the quantiles of ``q:error,q:error``. The error must be a number, but is not used (see
    `headrace.telemetry.summaries`)."""
    for pair in setting.removesuffix(",").split(",") if setting else ():
        quantile, colon, error = pair.partition(":")
        try:
            if not colon:
                raise ValueError("No ':' delimiter found. Expected format is <quantile>:<error>")
            value, _ = _leading_number(quantile), _leading_number(error)
        except (ValueError, OverflowError) as reason:
            log.error("--metrics-config: summary_quantiles: Invalid option: [%s]. %s", pair, reason)
        else:
            yield value


def _leading_number(text: str) -> float:
    """Return the number that ``text`` begins with, as C's ``strtod`` does. Raises `ValueError` if there is none."""
    text = text.lstrip()
    found = _HEXADECIMAL.match(text) or _DECIMAL.match(text)
    if found is None:
        raise ValueError("Error: stod")
    number = found.group()
    return float.fromhex(number) if "x" in number.lower() else float(number)
