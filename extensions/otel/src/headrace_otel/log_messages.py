"""Messages of OTLP for log lines and access records."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from time import monotonic_ns, time_ns
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ScopeLogs
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from headrace import Code
from headrace_otel.access_records import AccessRecord
from headrace_otel.log_lines import LogLine

#: ``traceparent`` of https://www.w3.org/TR/trace-context/.
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})").match
#: The scope of access records.
ACCESS = "headrace.access"


def write_records(records: Iterable[LogLine | AccessRecord], resource: Resource) -> bytes:
    """Return a message with ``records``."""
    request = ExportLogsServiceRequest()
    logs = request.resource_logs.add()
    logs.resource.CopyFrom(resource)
    scopes: dict[str, ScopeLogs] = {}
    now = time_ns()
    since_epoch_ns = now - monotonic_ns()
    for record in records:
        name = record.logger if isinstance(record, LogLine) else ACCESS
        scope = scopes.get(name)
        if scope is None:
            scope = scopes[name] = logs.scope_logs.add()
            scope.scope.name = name
        written = scope.log_records.add(observed_time_unix_nano=now)
        if isinstance(record, LogLine):
            _write_line(written, record)
        else:
            _write_access(written, record, since_epoch_ns)
    return request.SerializeToString()


def attribute(name: str, value: str | int) -> KeyValue:
    """Return an attribute."""
    made = KeyValue(key=name)
    if isinstance(value, int):
        made.value.int_value = value
    else:
        made.value.string_value = value.encode(errors="replace").decode()  # no single surrogates
    return made


def _write_line(written: LogRecord, line: LogLine) -> None:
    written.time_unix_nano = line.time_ns
    number, written.severity_text = _severity(line.level)
    written.severity_number = number
    written.body.string_value = line.text.encode(errors="replace").decode()
    written.attributes.extend([attribute(name, value) for name, value in line.attributes])
    written.trace_id, written.span_id = line.trace_id, line.span_id


def _severity(level: int) -> tuple[Any, str]:
    """Return the severity's number and text. Levels below INFO are those of ``--log-verbose``."""
    if level >= logging.CRITICAL:
        return 21, "FATAL"
    if level >= logging.ERROR:
        return 17, "ERROR"
    if level >= logging.WARNING:
        return 13, "WARNING"
    if level >= logging.INFO:
        return 9, "INFO"
    return (5, "VERBOSE") if level >= logging.DEBUG else (1, "VERBOSE")


def _write_access(written: LogRecord, access: AccessRecord, since_epoch_ns: int) -> None:
    record = access.finished
    written.time_unix_nano = record.ended_ns + since_epoch_ns
    code = record.code
    status = "ok" if code is None else code.value
    number, text = (9, "INFO") if code is None else (17, "ERROR") if code is Code.INTERNAL else (13, "WARNING")
    written.severity_number, written.severity_text = number, text  # type: ignore[assignment]
    written.body.string_value = " ".join(filter(None, (record.transport, access.operation, record.model, status)))
    values: dict[str, str | int] = {
        "transport": record.transport, "operation": access.operation, "status": status,
        "duration_us": (record.ended_ns - record.arrival_ns) // 1000,
    }  # fmt: skip
    values |= {
        name: value
        for name, value in (("peer", record.peer), ("principal", record.principal), ("model", record.model))
        if value
    }
    if record.version:
        values |= {"version": str(record.version), "request_bytes": record.request_bytes}
        values |= {"response_bytes": record.response_bytes, "responses": access.responses}
    if record.id:
        values["request_id"] = record.id
    if record.times is not None:
        start, _, _, end = record.times
        values |= {"queue_us": (start - record.queued_ns) // 1000, "compute_us": (end - start) // 1000}
    written.attributes.extend([attribute(f"headrace.{name}", value) for name, value in values.items()])
    if found := _TRACE(record.traceparent):
        written.trace_id, written.span_id = bytes.fromhex(found[1]), bytes.fromhex(found[2])
        written.flags = int(found[3], 16)
