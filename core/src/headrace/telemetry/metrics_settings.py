"""What ``--metrics-config`` asks for (docs/spec/behaviours.md section 7.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import ConfigError

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Which of the latency families are exported. Settings not named here are accepted, and
    ignored, as Triton does."""

    counter_latencies: bool = True
    summary_latencies: bool = False
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES


def parse(config: Mapping[str, str]) -> MetricsSettings:
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
