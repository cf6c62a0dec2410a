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
#: Nanoseconds of a second.
_S = 1_000_000_000
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
    start, caller = _text_parts(transport, operation, status, peer, principal, model)
    line = f"{_second(ended_ns // _S)}.{ended_ns % _S // 1000:06}Z {start} duration_us={duration_ns // 1000}{caller}"
    if version:
        name = f" id={_word(request_id)}" if request_id else ""
        line += (
            f" version={version}{name} request_bytes={request_bytes} response_bytes={response_bytes} "
            f"responses={responses}"
        )
    if queue_ns >= 0:
        line += f" queue_us={queue_ns // 1000} compute_us={compute_ns // 1000}"
    if traceparent and (trace := _TRACE(traceparent)):
        line += f" trace={trace[1]}"
    return line


@lru_cache(256)
def _text_parts(transport: str, operation: str, status: str, peer: str, principal: str, model: str) -> tuple[str, str]:
    """Return the parts before and after the duration, which many lines have in common."""
    named = {"peer": peer, "principal": principal, "model": model}
    caller = "".join([f" {name}={_word(value)}" for name, value in named.items() if value])
    return f"{_word(transport)} {_word(operation)} status={_word(status)}", caller


def json_line(access: Access) -> str:
    """Return ``access`` as a JSON object, in ASCII. A field that is not known is left out."""
    (ended_ns, transport, peer, principal, operation, model, version, request_id, status, request_bytes, response_bytes,
     responses, duration_ns, queue_ns, compute_ns, traceparent) = access  # fmt: skip
    common = _json_parts(transport, operation, status, peer, principal, model)
    time_ = f"{_second(ended_ns // _S)}.{ended_ns % _S // 1000:06}Z"
    line = f'{{"time":"{time_}"{common},"duration_us":{duration_ns // 1000}'
    if version:
        name = f',"request_id":{_quoted(request_id)}' if request_id else ""
        line += (
            f',"version":"{version}"{name},"request_bytes":{request_bytes},"response_bytes":{response_bytes},'
            f'"responses":{responses}'
        )
    if queue_ns >= 0:
        line += f',"queue_us":{queue_ns // 1000},"compute_us":{compute_ns // 1000}'
    if traceparent and (trace := _TRACE(traceparent)):
        line += f',"trace_id":"{trace[1]}"'
    return f"{line}}}"


@lru_cache(256)
def _json_parts(transport: str, operation: str, status: str, peer: str, principal: str, model: str) -> str:
    """Return the members that many lines have in common."""
    named = {
        "transport": transport, "operation": operation, "status": status, "peer": peer, "principal": principal,
        "model": model,
    }  # fmt: skip
    return "".join([f',"{name}":{_quoted(value)}' for name, value in named.items() if value])


def text_note(dropped: int) -> str:
    """Return the line that says how many records were dropped."""
    return f"# {dropped} records were dropped"


def json_note(dropped: int) -> str:
    """Return `text_note` as a JSON object."""
    return f'{{"dropped":{dropped}}}'


@lru_cache(4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _word(text: str) -> str:
    return text if _PLAIN(text) else json.dumps(text[:LONGEST])


def _quoted(text: str) -> str:
    return f'"{text}"' if _PLAIN(text) else json.dumps(text[:LONGEST])
