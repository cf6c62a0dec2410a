"""Settings of ``--metrics-config``, and numbers exactly as Triton prints them.

Source: docs/spec/behaviours.md sections 7.5 and 7.8.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase

from headrace.errors import ConfigError


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
_PATTERN = re.compile(r"[a-zA-Z0-9_:*?]+")

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Which latency families are exported."""

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES
    histograms: bool = True  #: the four that only Headrace has
    native_histograms: bool = False


def parse_metrics_config(config: Mapping[str, str]) -> MetricsSettings:
    """Return the settings of ``--metrics-config``. Raises `ConfigError` for a switch that is not "true" or "false".

    As in Triton, an unknown setting, and a part of ``summary_quantiles`` that is not a pair of numbers, are ignored.
    The log says so. If no part is valid, the default quantiles are used.
    """
    known = {"include", "exclude", "summary_quantiles", *(each.name for each in fields(MetricsSettings))}
    for setting in config.keys() - known:
        log.warning(
            "--metrics-config: no setting '%s'; there are: %s", setting, ", ".join(sorted(known - {"quantiles"}))
        )
    switches = {each.name: config[each.name] for each in fields(MetricsSettings) if each.name in config}
    for setting, text in switches.items():
        if text not in ("true", "false"):
            raise ConfigError(f"--metrics-config: {setting}: {text!r} is not true or false")
    quantiles = tuple(_quantiles(config.get("summary_quantiles", ""))) or DEFAULT_QUANTILES
    return MetricsSettings(quantiles=quantiles, **{setting: text == "true" for setting, text in switches.items()})


def family_filter(config: Mapping[str, str]) -> Callable[[str], bool]:
    """Return a function that is true for the names of families that ``include`` and ``exclude`` select.

    Each is a list of patterns with ``*`` and ``?``. Raises `ConfigError` for a pattern that no name can match.
    """
    patterns = {
        setting: config.get(setting, other).split(",") for setting, other in (("include", "*"), ("exclude", "-"))
    }
    for setting, expressions in patterns.items():
        for pattern in expressions if setting in config else ():
            if not _PATTERN.fullmatch(pattern):
                raise ConfigError(
                    f"--metrics-config: {setting}: {pattern!r} is no pattern of a name; it has letters, digits, '_', "
                    "':', '*' and '?' only, and a comma between two"
                )
    include, exclude = patterns.values()
    return lambda name: (
        any(fnmatchcase(name, each) for each in include) and not any(fnmatchcase(name, each) for each in exclude)
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
    match = _HEXADECIMAL.match(text) or _DECIMAL.match(text)
    if match is None:
        raise ValueError("Error: stod")
    number = match.group()
    return float.fromhex(number) if "x" in number.lower() else float(number)
