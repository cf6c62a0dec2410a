"""What the engine's process and a frontend process say to each other beside requests and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import IntEnum
from typing import Any

from headrace.config.options import Restriction, ServerOptions
from headrace.ipc.framing import PADDING, Buffer, Frame, ProtocolError, data_frame
from headrace.supervision.supervised_process import FIRST_WORK_KIND

#: Fields whose values are no plain ones, and which frontends read.
_RESTRICTIONS = ("http_restricted_api", "grpc_restricted_protocol")
_PLAIN = (str, int, float)


class FrontendKind(IntEnum):
    """The kinds of frame beside those of all processes (`headrace.ipc.framing.Kind`) and of their lives
    (`headrace.supervision.supervised_process.LifeKind`). What has a body is a `call_frame`."""

    MODELS = FIRST_WORK_KIND  # to the frontend; JSON: what has changed, by name of the model
    CALL = FIRST_WORK_KIND + 1  # body, JSON: id, and an HTTP request or a gRPC call
    ANSWER = FIRST_WORK_KIND + 2  # to the frontend; body, JSON: id, and an HTTP reply, or the end of a gRPC call
    CHUNK = FIRST_WORK_KIND + 3  # to the frontend; body, JSON: id; the first has the head of the answer, too
    TAKEN = FIRST_WORK_KIND + 4  # JSON: id; the caller has taken a chunk
    LEFT = FIRST_WORK_KIND + 5  # JSON: id; the caller has gone


def call_frame(kind: int, head: Mapping[str, Any], body: Sequence[Buffer] = ()) -> bytes:
    """A message of JSON and a body. Raises `ValueError` if it is too large."""
    size = sum(map(len, body))
    meta = json.dumps({**head, "size": size}).encode()
    return data_frame(kind, 0, [meta], [*body, PADDING[-size % 8]], size + -size % 8)


def read_call(message: Frame) -> tuple[dict[str, Any], memoryview]:
    """Head and body of a `call_frame`. Raises `ProtocolError`."""
    try:
        head = json.loads(message.text)
        size = head["size"]
        body = memoryview(message.body)[message.data : message.data + size]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ProtocolError(f"kind {message.kind}: {error}") from error
    if not isinstance(head, dict) or len(body) != size:
        raise ProtocolError(f"kind {message.kind}: {len(body)} bytes of {size}")
    return head, body


def write_options(options: ServerOptions) -> dict[str, Any]:
    """What frontends read of ``options``, as JSON: the plain values, and what is restricted."""
    found: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in _RESTRICTIONS:
            found[field.name] = {name: (rule.header, rule.value) for name, rule in value.items()}
        elif isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, str) for each in value)):
            found[field.name] = value
    return found | {"frontend_processes": 0}


def read_options(found: Mapping[str, Any]) -> ServerOptions:
    """What `write_options` wrote; everything else is as by default."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.items()
        if name not in _RESTRICTIONS
    }
    for name in _RESTRICTIONS:
        values[name] = {key: Restriction(*rule) for key, rule in found[name].items()}
    return ServerOptions(**values)


def text_headers(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """``headers`` for JSON."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def byte_headers(headers: Sequence[Sequence[str]]) -> list[tuple[bytes, bytes]]:
    """What `text_headers` wrote. Raises `ValueError` and `AttributeError` for anything else."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
