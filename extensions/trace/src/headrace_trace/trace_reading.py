"""Reads trace files: Triton's, and Headrace's, which have the same format. A file that is still written has no end."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace import HeadraceError, InvalidArgument, one_line


@dataclass
class ReadCall:
    """One call of a model in a file. ``times`` are nanoseconds by event, the last one of a repeated event."""

    id: int
    model: str = ""
    version: int = 0
    request_id: str = ""
    parent_id: int | None = None
    times: dict[str, int] = field(default_factory=dict)
    children: list[ReadCall] = field(default_factory=list)

    @property
    def begin_ns(self) -> int:
        """The arrival of its request. Triton's gRPC server waits for it from the end of the previous one."""
        waited = "GRPC_WAITREAD_START"
        return min(at_ns for name, at_ns in self.times.items() if name != waited or len(self.times) == 1)

    @property
    def end_ns(self) -> int:
        return max(self.times.values())

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.begin_ns

    def between(self, first: str, last: str) -> int | None:
        """Return the nanoseconds from one event to another; None if the file lacks one."""
        if first not in self.times or last not in self.times:
            return None
        return self.times[last] - self.times[first]


def read_traces(path: str) -> list[ReadCall]:
    """Return the calls of clients in a trace file, in the order of their ids, with the calls of models as children.

    Raises `InvalidArgument` with the reason if it is no trace file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise InvalidArgument(f"'{path}' can not be read: {reason}") from None
    try:
        return link(_calls(_records(text)))
    except HeadraceError as error:
        raise InvalidArgument(f"'{path}' is no trace file: {error.message}") from None


def link(calls: Iterable[ReadCall]) -> list[ReadCall]:
    """Return the calls without a parent, and put the others into ``children`` of theirs."""
    by_id = {call.id: call for call in calls if call.times}
    children: dict[int, list[ReadCall]] = defaultdict(list)
    roots: list[ReadCall] = []
    for call in sorted(by_id.values(), key=lambda call: call.id):
        is_child = call.parent_id in by_id and call.parent_id < call.id  # a call by a model is after its request
        (children[call.parent_id] if is_child and call.parent_id is not None else roots).append(call)
    for call in by_id.values():
        call.children = sorted(children[call.id], key=lambda child: child.begin_ns)
    return roots


def _records(text: str) -> list[Any]:
    whole = text.strip()
    if not whole:
        raise InvalidArgument("it is empty")
    try:
        records = json.loads(whole)
    except RecursionError:
        raise InvalidArgument("its JSON is nested too deep") from None
    except ValueError as error:
        try:
            records = json.loads(whole + "]")  # it is still written
        except (ValueError, RecursionError):
            raise InvalidArgument(f"its JSON is broken: {error}") from None
    if not isinstance(records, list):
        raise InvalidArgument("its JSON is no array")
    return records


def _calls(records: Iterable[Any]) -> Iterable[ReadCall]:
    calls: dict[int, ReadCall] = {}
    for number, record in enumerate(records):
        if not isinstance(record, dict) or type(record.get("id")) is not int:
            raise InvalidArgument(f"record {number} is no object with a number 'id'")
        call = calls.setdefault(record["id"], ReadCall(record["id"]))
        if "model_name" in record:
            call.model = one_line(str(record["model_name"]))
            call.version = _integer(record.get("model_version", 0), number, "model_version")
            call.request_id = one_line(str(record.get("request_id", "")))
            parent = record.get("parent_id", 0)
            call.parent_id = _integer(parent, number, "parent_id") or None
        stamps = record.get("timestamps", ())
        if not isinstance(stamps, list | tuple) or not all(isinstance(stamp, dict) for stamp in stamps):
            raise InvalidArgument(f"'timestamps' of record {number} is no array of objects")
        for stamp in stamps:
            if at_ns := _integer(stamp.get("ns"), number, "ns"):  # Triton writes 0 for the answer of generate
                call.times[str(stamp.get("name"))] = at_ns
    return calls.values()


def _integer(value: object, number: int, name: str) -> int:
    if type(value) is not int:
        raise InvalidArgument(f"'{name}' of record {number} is no integer")
    return value
