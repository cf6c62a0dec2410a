"""W3C trace contexts (https://www.w3.org/TR/trace-context/): read from callers, created for calls of models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import getrandbits
from typing import NamedTuple

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", re.ASCII)
#: A longer header is no trace context.
_MAX_CHARACTERS = 512


class CallContext(NamedTuple):
    """The ids of a call: of its trace, of its span ``model``, and of the parent span of ``outer``.

    ``outer`` is the span of a client's request, around the model's; 0 for a call by a model.
    """

    trace_id: int
    outer: int
    model: int
    parent: int
    tracestate: str = ""

    def headers(self) -> dict[str, str]:
        """Return the headers for what is done for the call."""
        sent = {"traceparent": f"00-{self.trace_id:032x}-{self.model:016x}-01"}
        return {**sent, "tracestate": self.tracestate} if self.tracestate else sent


def parse(traceparent: str) -> tuple[int, int] | None:
    """Return the ids of the trace and of the parent; None if the header is invalid. Version 00 has no more fields."""
    found = None if len(traceparent) > _MAX_CHARACTERS else _TRACEPARENT.fullmatch(traceparent)
    if found is None or (found[3] and traceparent.startswith("00")):
        return None
    trace_id, parent = int(found[1], 16), int(found[2], 16)
    return (trace_id, parent) if trace_id and parent else None


def of_client(sent: Mapping[str, str]) -> CallContext:
    """Return the context of a client's request, as a part of the trace in the headers ``sent``, if that is valid."""
    found = parse(sent.get("traceparent", ""))
    trace_id, parent = found or (getrandbits(128) or 1, 0)
    state = sent.get("tracestate", "")
    return CallContext(trace_id, new_id(), new_id(), parent, state if found and len(state) <= _MAX_CHARACTERS else "")


def of_model(caller: CallContext) -> CallContext:
    """Return the context of a call that a model makes."""
    return caller._replace(outer=0, model=new_id(), parent=caller.model)


def new_id() -> int:
    """Return the id of a new span."""
    return getrandbits(64) or 1
