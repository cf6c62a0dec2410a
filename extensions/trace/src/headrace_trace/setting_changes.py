"""Changes of trace settings as clients write them: a JSON document, or a gRPC message.

Source: docs/spec/behaviours.md section 12.1, and what Triton 2.51 answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace import Code, InvalidArgument, Unsupported
from headrace_trace.settings import read_level, read_number

#: The numbers among the settings, with their names in `headrace_trace.settings.Changes`.
_NUMBERS = {"trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}


def read_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes in a JSON document. Raises `InvalidArgument` and `Unsupported`, in Triton's words."""
    if "trace_file" in document:
        raise _file_refused()
    changes: dict[str, Any] = {}
    if "trace_level" in document:
        names = document["trace_level"]
        if names is None:
            changes["level"] = None
        else:
            if type(names) is not list:
                raise _wrong_type("array")
            if any(type(name) is not str for name in names):
                raise _wrong_type("string")
            if (level := read_level(names)) is not None:
                changes["level"] = level
    for name, field in _NUMBERS.items():
        if name in document:
            value = document[name]
            if value is not None and type(value) is not str:
                raise _wrong_type("string")
            changes[field] = None if value is None else read_number(name, value)
    return changes


def read_message(settings: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the changes in a gRPC message. Raises as `read_document`."""
    if "trace_file" in settings:
        raise _file_refused()
    changes: dict[str, Any] = {}
    if "trace_level" in settings:
        names = settings["trace_level"]
        level = read_level(names) if names else None
        if level is not None or not names:
            changes["level"] = level
    for name, field in _NUMBERS.items():
        if name in settings:
            values = settings[name]
            if len(values) > 1:
                raise InvalidArgument(f"expect only 1 value for '{name}'")
            changes[field] = read_number(name, values[0], blank=" ") if values else None
    return changes


def _wrong_type(kind: str) -> InvalidArgument:
    return InvalidArgument(f"attempt to access JSON non-{kind} as {kind}", Code.INTERNAL)


def _file_refused() -> Unsupported:
    return Unsupported("trace file location can not be updated through network protocol")
