"""The parts of messages that are JSON because they are rare: calls and their results, the parameters and sequence
ids of requests, and the parameters of responses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.messages.caller import Caller
from headrace.messages.request import InferRequest, Parameter
from headrace_processes.ipc.framing import Frame, ProtocolError, frame


def json_frame(kind: int, value: object) -> bytes:
    """Return a message whose meta is ``value`` as JSON."""
    return frame(kind, 0, json.dumps(value).encode())


def read_json(message: Frame) -> dict[str, Any]:
    """Return the JSON object of a `json_frame`. Raises `ProtocolError` for anything else."""
    try:
        found = json.loads(message.text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"kind {message.kind}: {error}") from error
    if not isinstance(found, dict):
        raise ProtocolError(f"kind {message.kind}: a {type(found).__name__}")
    return found


def pack_settings(request: InferRequest, sender: Caller | None = None) -> bytes:
    """Return the parameters and the sequence id of ``request`` as JSON, and what its ``sender`` is."""
    settings: list[object] = [dict(request.parameters), request.sequence_id]
    if sender is not None:
        settings.append([sender.transport, sender.principal, sender.deadline_ns, dict(sender.trace_context)])
    return json.dumps(settings).encode()


def unpack_settings(text: bytes) -> tuple[dict[str, Parameter], int | str, Caller | None]:
    """Return what `pack_settings` wrote: parameters, sequence id, sender. Raises `ProtocolError` for anything else."""
    match json.loads(text):
        case [dict() as parameters, int() | str() as sequence_id]:
            return _scalars(parameters), sequence_id, None
        case [
            dict() as parameters,
            int() | str() as sequence_id,
            [str(transport), str(who), int(deadline_ns), dict(trace)],
        ]:
            sender = Caller(transport, principal=who, deadline_ns=deadline_ns, trace_context=trace)
            return _scalars(parameters), sequence_id, sender
        case _:
            raise ProtocolError("settings that are not parameters, a sequence id and a sender")


def pack_parameters(parameters: Mapping[str, Parameter]) -> bytes:
    """Return the parameters of a response as JSON."""
    return json.dumps(dict(parameters)).encode()


def unpack_parameters(text: bytes) -> dict[str, Parameter]:
    """Return what `pack_parameters` wrote. Raises `ProtocolError` for anything else."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ProtocolError(f"parameters of type {type(found).__name__}")
    return _scalars(found)


def _scalars(parameters: dict[str, Any]) -> dict[str, Parameter]:
    for key, value in parameters.items():
        if not isinstance(value, str | int | float):
            raise ProtocolError(f"a parameter '{key}' of type {type(value).__name__}")
    return parameters
