"""Parses the texts of flags to typed values. The error texts are Triton's (docs/spec/behaviours.md section 8).

A reader parses the text after ``--flag=``; its `ValueError` has the text that follows ``Bad option: "--flag".``.
A gatherer combines the values of a flag that may be repeated.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from headrace.config.option_parts import RESTRICTED_CATEGORIES, RateLimitResource, Restriction, TraceSetting
from headrace.config.options import header_pattern
from headrace.telemetry.exposition import family_filter, parse_metrics_config

INT32 = 2**31 - 1
INT64 = 2**63 - 1
_TRUE, _FALSE = ("true", "on", "1"), ("false", "off", "0")


def text(value: str) -> str:
    return value


def utf8(value: str) -> str:
    """Return ``value``. Raises `ValueError` for bytes that are not UTF-8: answers must be able to repeat the value."""
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"Invalid option value: not UTF-8. Got {value.encode('utf-8', 'backslashreplace').decode()}")
    return value


def boolean(value: str) -> bool:
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise ValueError(f"invalid value for bool option: {value}")


def integer(low: int = -INT32 - 1, high: int = INT32) -> Callable[[str], int]:
    """Return a reader of decimal integers from ``low`` to ``high``."""

    def read(value: str) -> int:
        if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
            raise ValueError(f"Invalid option value. Got {value}")
        if len(value) > 40 or not low <= int(value) <= high:
            raise ValueError(f"Provided option value is out of bound. Got {value}")
        return int(value)

    return read


int32 = integer()
count = integer(0)
port = integer(0, 65535)
size = integer(0, INT64)


def real(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"Invalid option value. Got {value}") from None
    if not math.isfinite(number):
        raise ValueError(f"Provided option value is out of bound. Got {value}")
    return number


def milliseconds(value: str) -> int:
    """Return whole milliseconds. Triton's help shows a number with a fraction, which its server drops."""
    number = int(real(value))
    if not -INT32 - 1 <= number <= INT32:
        raise ValueError(f"Provided option value is out of bound. Got {value}")
    return number


def fraction(value: str) -> float:
    """Return a number from 0 to 1."""
    if not 0 <= real(value) <= 1:
        raise ValueError(f"Provided option value is out of bound. Got {value}")
    return real(value)


def positive(flag: str, high: int) -> Callable[[str], int]:
    """Return a reader of integers from 1 to ``high``. The error text names ``flag``."""
    read_any = integer(-INT64 - 1, high)

    def read(value: str) -> int:
        if read_any(value) <= 0:
            raise ValueError(f"Error: --{flag} must be greater than 0.")
        return read_any(value)

    return read


def processes(value: str) -> int:
    """Return a number of processes; ``auto`` is one per core that this process may use."""
    if value.lower() != "auto":
        return count(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def grpc_threads(value: str) -> int:
    if not 2 <= int32(value) <= 128:
        raise ValueError("invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128.")
    return int32(value)


def not_empty(flag: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if not value:
            raise ValueError(f"Error: empty argument for --{flag}")
        return value

    return read


def level(value: str) -> int:
    """Return a verbosity: an integer; true is 1 and false is 0."""
    return {"true": 1, "false": 0}[value.lower()] if value.lower() in ("true", "false") else int32(value)


def choice(flag: str, *allowed: str, ignore_case: bool = False) -> Callable[[str], str]:
    """Return a reader of one of ``allowed``. The error text names ``flag``."""

    def read(value: str) -> str:
        word = value.lower() if ignore_case else value
        if word not in allowed:
            raise ValueError(f"invalid argument for --{flag}, must be one of {', '.join(allowed)}. Got {value}")
        return word

    return read


def pattern(value: str) -> str:
    """Return a regular expression. It is checked here, so that an invalid one is reported at start."""
    if value:
        header_pattern(value)
    return value


def names(value: str) -> tuple[str, ...]:
    """Return comma-separated names, without the spaces around them."""
    return tuple(name.strip() for name in value.split(",") if name.strip())


def pair(first: Callable[[str], Any], second: Callable[[str], Any], separator: str) -> Callable[[str], tuple[Any, Any]]:
    """Return a reader of ``<first><separator><second>``."""

    def read(value: str) -> tuple[Any, Any]:
        if separator not in value:
            raise ValueError(
                "Cannot parse pair option due to incorrect number of inputs."
                f"--<pair option> argument requires format <first>{separator}<second>. Found: {value}"
            )
        left, right = value.split(separator, 1)
        return first(left), second(right)

    return read


def setting(
    flag: str, owner: str, *, needs_owner: bool = True, noun: str | None = None
) -> Callable[[str], tuple[str, str, str]]:
    """Return a reader of ``<owner>,<key>=<value>``. The owner is "" for a global setting.

    The error for a missing owner names ``noun``, by default the first word of ``owner``; "" has no error of its own.
    """
    expected = f"<{owner}>,<setting>=<value>"
    named = owner.partition(" ")[0] if noun is None else noun
    also = "" if needs_owner else " or <setting>=<value>"

    def read(value: str) -> tuple[str, str, str]:
        head, equals, rest = value.partition("=")
        first, comma, second = head.partition(",")
        name, key = (first, second) if comma else ("", first)
        lacks_owner = not name and bool(comma or needs_owner)
        if lacks_owner and named:
            raise ValueError(f"No {named} specified. --{flag} option format is {expected}{also}. Got {value}")
        if lacks_owner or not equals or not key or not rest:
            raise ValueError(f"--{flag} option format is '{expected}'. Got {value}")
        return name, key, rest

    return read


def host_policy(value: str) -> tuple[str, str, str]:
    """Return policy, key and value of a setting that Triton has."""
    setting_pair = setting("host-policy", "policy name", noun="")(value)
    if setting_pair[1] not in ("numa-node", "cpu-cores"):
        raise ValueError(
            f"Unsupported host policy setting '{setting_pair[1]}' is specified, supported settings are 'numa-node', "
            "'cpu-cores'"
        )
    return setting_pair


def port_range(value: str) -> tuple[int, int]:
    """Return the ports of ``<first>-<last>``."""
    first, last = pair(port, port, "-")(value)
    return first, last


def metrics_setting(value: str) -> tuple[str, str]:
    """Return the key and value of ``<key>=<value>``. A comma is refused: metrics settings have no owner."""
    key, equals, rest = value.partition("=")
    if "," in key or not key or not equals or not rest:
        raise ValueError(f"--metrics-config option format is <setting>=<value>. Got {value}")
    if key != "summary_quantiles":  # its errors are lines of the log, as Triton's
        parse_metrics_config({key: rest})
        family_filter({key: rest})
    return key, rest


def resource(value: str) -> RateLimitResource:
    """Return the resource of ``<name>:<count>[:<device>]``."""
    parts = value.split(":")
    if len(parts) not in (2, 3) or not parts[0]:
        raise ValueError(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {value}"
        )
    return RateLimitResource(parts[0], count(parts[1]), count(parts[2]) if len(parts) == 3 else None)


def trace(value: str) -> TraceSetting:
    """Return the setting of ``[<mode>,]<key>=<value>``."""
    mode, key, rest = setting("trace-config", "mode", needs_owner=False)(value)
    return TraceSetting(mode, key, rest)


def restriction(flag: str, noun: str, prefix: str = "") -> Callable[[str], list[tuple[str, Restriction]]]:
    """Return a reader of ``<category>[,<category>]:<key>=<value>``. The value is a secret: no error text shows it."""

    def read(value: str) -> list[tuple[str, Restriction]]:
        shown, equals, secret = value.partition("=")
        categories, _, key = shown.partition(":")
        if not (categories and key and equals and secret):
            got = shown if equals else categories
            raise ValueError(f"--{flag} option format is '<config name>:<setting>=<value>'. Got {got}")
        unknown = [category for category in categories.split(",") if category not in RESTRICTED_CATEGORIES]
        if unknown:
            raise ValueError(f"unknown restricted {noun} '{unknown[0]}'")
        return [(category, Restriction(prefix + key, secret)) for category in categories.split(",")]

    return read


def restrictions(noun: str) -> Callable[[Iterable[list[tuple[str, Restriction]]]], dict[str, Restriction]]:
    """Return a gatherer of `restriction`, which raises `ValueError` for a category that is in two groups."""

    def gather(groups: Iterable[list[tuple[str, Restriction]]]) -> dict[str, Restriction]:
        restrictions: dict[str, Restriction] = {}
        for category, needed in chain.from_iterable(groups):
            if category in restrictions:
                raise ValueError(f"restricted {noun} '{category}' can not be specified in multiple config groups")
            restrictions[category] = needed
        return restrictions

    return gather


def traces(settings: Sequence[TraceSetting]) -> tuple[TraceSetting, ...]:
    """Return all settings, except those of deprecated flags that other flags override."""
    current = {(setting.mode, setting.key) for setting in settings if not setting.is_deprecated}
    return tuple(each for each in settings if not (each.is_deprecated and (each.mode, each.key) in current))


def collect(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(values)


def nest(values: Iterable[tuple[str, str, str]]) -> dict[str, dict[str, str]]:
    """Return the settings by owner, then by key. The last value of a key wins."""
    owners: dict[str, dict[str, str]] = {}
    for owner, key, value in values:
        owners.setdefault(owner, {})[key] = value
    return owners


def one_cache(values: Iterable[tuple[str, str, str]]) -> dict[str, dict[str, str]]:
    """Return `nest` for caches. Raises `ValueError` for more than one cache."""
    caches = nest(values)
    if len(caches) > 1:
        raise ValueError("found multiple cache configurations, but only a single cache is currently supported")
    return caches
