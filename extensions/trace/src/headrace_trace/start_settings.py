"""The settings of ``--trace-config``, and of the deprecated flags that mean the same.

Source: docs/spec/behaviours.md section 8.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headrace import ConfigError, HeadraceError, ServerOptions
from headrace_trace.settings import LEVELS, TraceSettings, read_number

_MODES = ("triton", "opentelemetry")
_PROTOCOLS = ("http/protobuf", "grpc")
#: Numbers of mode ``opentelemetry``, with their defaults. Times are milliseconds.
_BATCHES = {"bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512}
_OPENTELEMETRY = ("url", "protocol", "resource", *_BATCHES)


@dataclass(frozen=True)
class StartSettings:
    """The settings of a server at its start. ``exporter`` and ``resource`` are for mode ``opentelemetry``."""

    settings: TraceSettings = field(default_factory=TraceSettings)
    exporter: Mapping[str, str] = field(default_factory=dict)
    resource: Mapping[str, str] = field(default_factory=dict)

    @property
    def most_queued(self) -> int:
        """The most requests that wait to be sent."""
        return int(self.exporter["bsp_max_queue_size"])

    @property
    def most_sent(self) -> int:
        """The most requests that are sent at once."""
        return int(self.exporter["bsp_max_export_batch_size"])

    @property
    def send_delay_s(self) -> float:
        """The time for which a request waits for others to be sent with it."""
        return int(self.exporter["bsp_schedule_delay"]) / 1000

    @property
    def may_trace(self) -> bool:
        """True if requests can be traced, now or after a change of settings."""
        return self.settings.mode == "opentelemetry" or bool(self.settings.file)


def read_options(options: ServerOptions) -> StartSettings:
    """Return the settings in ``options``. Raises `ConfigError`."""
    values: dict[str, str] = {}
    levels: set[str] = set()
    exporter: dict[str, str] = {}
    resource: dict[str, str] = {}
    for one in options.trace_config:
        if one.mode == "opentelemetry" and one.key in _OPENTELEMETRY:
            if one.key == "resource":
                name, equals, value = one.value.partition("=")
                if not (name and equals):
                    raise ConfigError(f"--trace-config opentelemetry,resource expects <key>=<value>, got: {one.value}")
                resource[name] = value
            else:
                exporter[one.key] = one.value
        elif not one.mode and one.key == "level":
            levels |= _read_level(one.value)
        elif (one.mode, one.key) in _KEYS:
            values[_KEYS[one.mode, one.key]] = one.value
        else:
            shown = f"{one.mode},{one.key}" if one.mode else one.key
            raise ConfigError(f"--trace-config: '{shown}' is not a setting; known are: {_known()}")
    for name, default in _BATCHES.items():
        text = exporter.setdefault(name, os.environ.get(f"OTEL_{name.upper()}") or str(default))
        if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) < 2**31):
            raise ConfigError(f"--trace-config: opentelemetry,{name} expects 1 to 2147483647, got: {text}")
    mode = values.get("mode", "triton").lower()
    if mode not in _MODES:
        raise ConfigError(f"--trace-config: invalid argument for mode, got: {mode}; expected triton or opentelemetry")
    numbers = {name: _number(name, values[name]) for name in ("rate", "count", "log_frequency") if name in values}
    level = tuple(each for each in LEVELS if each in levels)
    if numbers.get("rate") == 0:  # also without a level, which may be set later
        raise ConfigError("--trace-config: rate expects 1 to 4294967295, got: 0")
    _check_collector(exporter)
    settings = TraceSettings(level, file=values.get("file", ""), mode=mode, **numbers)
    try:
        settings.check()
    except HeadraceError as error:
        raise ConfigError(f"--trace-config: {error.message.partition(':')[2]}") from None
    return StartSettings(settings, exporter, resource)


_USER = re.compile(r"(?<=://)[^/@]+@")
_KEYS = {
    ("", "mode"): "mode",
    ("", "rate"): "rate",
    ("", "count"): "count",
    ("triton", "file"): "file",
    ("triton", "log-frequency"): "log_frequency",
}
_NAMES = {"rate": "trace_rate", "count": "trace_count", "log_frequency": "log_frequency"}


def _check_collector(exporter: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an address or a protocol that no exporter has, also in mode ``triton``."""
    protocol, url = exporter.get("protocol", _PROTOCOLS[0]), exporter.get("url", "http://localhost")
    if protocol not in _PROTOCOLS:
        raise ConfigError(
            f"--trace-config: invalid argument for opentelemetry,protocol, got: {protocol}; expected http/protobuf or "
            "grpc"
        )
    parts = urlsplit(url if "://" in url else f"//{url}")
    if not parts.hostname or (protocol == _PROTOCOLS[0] and parts.scheme not in ("http", "https")):
        shown = without_user(url)
        raise ConfigError(f"--trace-config: invalid argument for opentelemetry,url, got: {shown}; expected http://host")


def without_user(url: str) -> str:
    """Return ``url``, the address of a collector, without its user and its password."""
    return _USER.sub("***@", url)


def _known() -> str:
    named = [",".join(filter(None, key)) for key in _KEYS]
    return ", ".join(["level", *named, *(f"opentelemetry,{key}" for key in _OPENTELEMETRY)])


def _number(name: str, text: str) -> int:
    try:
        number = read_number(_NAMES[name], text)
    except HeadraceError as error:
        raise ConfigError(f"--trace-config: {error.message}") from None
    if str(number) != text.strip():
        raise ConfigError(f"--trace-config: Unable to parse '{_NAMES[name]}', got: {text}")
    return number


def _read_level(text: str) -> set[str]:
    found = text.upper()
    if found in LEVELS:
        return {found}
    if found in ("OFF", "FALSE"):
        return set()
    if found in ("MIN", "MAX", "TRUE"):
        return {"TIMESTAMPS"}
    raise ConfigError(f"--trace-config: invalid argument for level, got: {text}; expected OFF, TIMESTAMPS or TENSORS")
