"""The flags of this distribution. Secrets and certificates come from the variables of OpenTelemetry, not from flags.

Source: https://opentelemetry.io/docs/specs/otel/protocol/exporter/.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal
from urllib.parse import unquote, urlsplit

from headrace import OptionGroup
from headrace_otel.record_queue import RecordQueue

_PORTS = {"http/protobuf": 4318, "grpc": 4317}
_USER = re.compile(r"(?<=://)[^/@]+@")
#: Shortest and longest interval of metrics, and the longest timeout, in milliseconds.
_LEAST_MS, _MAX_MS = 100, 86_400_000


@dataclass(frozen=True)
class CollectorAddress:
    """The target of messages. ``certificate`` is the file of the authorities (empty: those of the system)."""

    protocol: str
    host: str
    port: int
    path: str
    is_secure: bool
    headers: Mapping[str, str]
    certificate: str
    timeout_s: float


@dataclass(frozen=True)
class OtelOptions(OptionGroup):
    """Metrics and logs for a collector of OpenTelemetry."""

    name: ClassVar[str] = "otel"
    metrics: bool = field(default=False, metadata={"help": "Send all metrics."})
    logs: bool = field(default=False, metadata={"help": "Send the lines of the log."})
    access: bool = field(default=False, metadata={"help": "Send a record of each operation."})
    endpoint: str = field(
        default="",
        metadata={"help": "URL of the collector. Empty: OTEL_EXPORTER_OTLP_ENDPOINT, or this machine."},
    )
    protocol: Literal["http/protobuf", "grpc"] | None = field(
        default=None, metadata={"help": "Protocol. Default: OTEL_EXPORTER_OTLP_PROTOCOL, or http/protobuf."}
    )
    resource: str = field(
        default="", metadata={"help": "Attributes of all metrics and records: <key>=<value>,<key>=<value>."}
    )
    interval_ms: int = field(default=60_000, metadata={"help": "Milliseconds between two exports of the metrics."})
    histograms: Literal["explicit", "exponential"] = field(
        default="explicit", metadata={"help": "The kind of histograms with powers of two as bounds."}
    )

    def __post_init__(self) -> None:
        if not self.is_on:
            rest = (self.endpoint, self.protocol, self.resource, self.interval_ms, self.histograms)
            if rest != ("", None, "", 60_000, "explicit"):
                raise ValueError("the other flags need --otel-metrics, --otel-logs or --otel-access")
            return
        if not _LEAST_MS <= self.interval_ms <= _MAX_MS:
            raise ValueError(f"--otel-interval-ms is {self.interval_ms}, expected {_LEAST_MS} to {_MAX_MS}")
        _ = self.target, self.attributes

    @property
    def is_on(self) -> bool:
        """True if anything is sent."""
        return self.metrics or self.logs or self.access

    @cached_property
    def queue(self) -> RecordQueue:
        """The records of the one server that has these options."""
        return RecordQueue()

    @cached_property
    def target(self) -> CollectorAddress:
        """The collector. Raises `ValueError` for an address, protocol, header or timeout that is none."""
        protocol = self.protocol or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        if protocol not in _PORTS:
            raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, expected http/protobuf or grpc")
        endpoint = self.endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
        url = endpoint or f"http://localhost:{_PORTS[protocol]}"
        shown = _USER.sub("***@", url)
        try:
            parts = urlsplit(url)
            port = _PORTS[protocol] if parts.port is None else parts.port
        except ValueError as error:
            raise ValueError(f"--otel-endpoint is {shown!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not (parts.hostname and port) or parts.query or parts.fragment:
            raise ValueError(f"--otel-endpoint is {shown!r}, expected http://<host>:<port> or https://<host>:<port>")
        if "@" in parts.netloc:
            raise ValueError(f"--otel-endpoint is {shown!r}: credentials go into OTEL_EXPORTER_OTLP_HEADERS")
        timeout = os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") or "10000"
        if not (timeout.isascii() and timeout.isdigit() and 0 < int(timeout[:10]) <= _MAX_MS):
            raise ValueError(f"OTEL_EXPORTER_OTLP_TIMEOUT is {timeout!r}, expected milliseconds")
        return CollectorAddress(
            protocol,
            parts.hostname,
            port,
            parts.path.rstrip("/"),
            parts.scheme == "https",
            _pairs(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""), "OTEL_EXPORTER_OTLP_HEADERS", is_secret=True),
            os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE", ""),
            int(timeout) / 1000,
        )

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """The attributes of the resource that are set. Raises `ValueError`."""
        service = os.environ.get("OTEL_SERVICE_NAME")
        return {
            "service.name": "triton-inference-server",
            **_pairs(os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""), "OTEL_RESOURCE_ATTRIBUTES"),
            **({"service.name": service} if service else {}),
            **_pairs(self.resource, "--otel-resource"),
        }


def _pairs(text: str, where: str, is_secret: bool = False) -> dict[str, str]:
    """Return the pairs of ``<key>=<value>,<key>=<value>``, in which values are percent-encoded."""
    found: dict[str, str] = {}
    for pair in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = (word.strip() for word in pair.partition("="))
        if not (name and equals) or "\n" in unquote(value) or "\r" in unquote(value):
            shown = "a pair of it" if is_secret else repr(pair)
            raise ValueError(f"{where}: {shown} is not <key>=<value>")
        found[name.lower() if is_secret else name] = unquote(value)
    return found
