"""A line of the access log, from the record of an operation.

Callers choose ids, names of models and addresses. So a text is written as it is if it has only letters, digits and a
few signs, and as a JSON string in ASCII if it has anything else: no caller can end a line, add a field, or write to a
terminal.
"""

from __future__ import annotations

import json
import re
import time
from functools import lru_cache
from typing import NamedTuple

#: Texts of callers are cut to so many characters.
LONGEST = 256
_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+-]+").fullmatch
#: ``traceparent`` of https://www.w3.org/TR/trace-context/.
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}").match


class Access(NamedTuple):
    """One operation that is over. Times are in nanoseconds; -1 for a request that no instance has executed.

    Sizes are the bytes of all input and of all output tensors. ``version`` and ``request_id`` are empty if the request
    was refused before it was read.
    """

    ended_ns: int
    transport: str
    peer: str
    principal: str
    operation: str
    model: str
    version: int
    request_id: str
    status: str
    request_bytes: int
    response_bytes: int
    responses: int
    duration_ns: int
    queue_ns: int
    compute_ns: int
    traceparent: str


def text_line(access: Access) -> str:
    """Return ``access`` as fields ``name=value`` with blanks between them. A field that is not known is left out."""
    (ended_ns, transport, peer, principal, operation, model, version, request_id, status, request_bytes, response_bytes,
     responses, duration_ns, queue_ns, compute_ns, traceparent) = access  # fmt: skip
    line = f"{_time(ended_ns)} {transport} {_word(operation)} status={_word(status)} duration_us={duration_ns // 1000}"
    if peer:
        line += f" peer={_word(peer)}"
    if principal:
        line += f" principal={_word(principal)}"
    if model:
        line += f" model={_word(model)}"
    if version:
        line += f" version={version}"
        if request_id:
            line += f" id={_word(request_id)}"
        line += f" request_bytes={request_bytes} response_bytes={response_bytes} responses={responses}"
    if queue_ns >= 0:
        line += f" queue_us={queue_ns // 1000} compute_us={compute_ns // 1000}"
    if traceparent and (trace := _TRACE(traceparent)):
        line += f" trace={trace[1]}"
    return line


def json_line(access: Access) -> str:
    """Return ``access`` as a JSON object, in ASCII. A field that is not known is left out."""
    (ended_ns, transport, peer, principal, operation, model, version, request_id, status, request_bytes, response_bytes,
     responses, duration_ns, queue_ns, compute_ns, traceparent) = access  # fmt: skip
    line = (
        f'{{"time":"{_time(ended_ns)}","transport":{_quoted(transport)},"operation":{_quoted(operation)},'
        f'"status":{_quoted(status)},"duration_us":{duration_ns // 1000}'
    )
    if peer:
        line += f',"peer":{_quoted(peer)}'
    if principal:
        line += f',"principal":{_quoted(principal)}'
    if model:
        line += f',"model":{_quoted(model)}'
    if version:
        line += f',"version":"{version}"'
        if request_id:
            line += f',"request_id":{_quoted(request_id)}'
        line += f',"request_bytes":{request_bytes},"response_bytes":{response_bytes},"responses":{responses}'
    if queue_ns >= 0:
        line += f',"queue_us":{queue_ns // 1000},"compute_us":{compute_ns // 1000}'
    if traceparent and (trace := _TRACE(traceparent)):
        line += f',"trace_id":"{trace[1]}"'
    return f"{line}}}"


def text_note(dropped: int) -> str:
    """Return the line that says how many records were dropped."""
    return f"# {dropped} records were dropped"


def json_note(dropped: int) -> str:
    """Return `text_note` as a JSON object."""
    return f'{{"dropped":{dropped}}}'


def _time(ns: int) -> str:
    """Return a time since 1970 in UTC, to the microsecond."""
    seconds, rest_ns = divmod(ns, 1_000_000_000)
    return f"{_second(seconds)}.{rest_ns // 1000:06}Z"


@lru_cache(4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _word(text: str) -> str:
    return text if _PLAIN(text) else json.dumps(text[:LONGEST])


def _quoted(text: str) -> str:
    return f'"{text}"' if _PLAIN(text) else json.dumps(text[:LONGEST])
