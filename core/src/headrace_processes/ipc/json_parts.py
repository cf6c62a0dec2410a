"""The rare parts of messages, which are JSON: calls and their results, the parameters and sequence ids of requests, and
the parameters of responses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.messages.caller import Caller
from headrace.messages.request import InferRequest, Parameter
from headrace_processes.ipc.framing import Frame, ProtocolError, frame


def json_frame(kind: int, value: object) -> bytes:
    """Return a message whose meta is ``value`` as JSON."""
    return frame(kind, 0, json.dumps(value).encode())


def read_json(message: Frame) -> dict[str, Any]:
    """Return the JSON object of a `json_frame`. Raises `ProtocolError` for anything else."""
    try:
        value = json.loads(message.text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"kind {message.kind}: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"kind {message.kind}: a {type(value).__name__}")
    return value


class RareSettings(NamedTuple):
    """The rare parts of a request. ``targets`` are the places for outputs, by name: the number of a mapping, the offset
    in it, and the size in bytes."""

    parameters: dict[str, Parameter]
    sequence_id: int | str
    sender: Caller | None = None
    targets: Mapping[str, tuple[int, int, int]] = MappingProxyType({})


#: The settings of a request that has none.
NO_SETTINGS = RareSettings({}, 0)


def pack_settings(
    request: InferRequest, sender: Caller | None = None, targets: Mapping[str, tuple[int, int, int]] | None = None
) -> bytes:
    """Return the parameters and the sequence id of ``request``, its ``sender``, and its ``targets`` as JSON."""
    settings: list[object] = [dict(request.parameters), request.sequence_id, targets or {}]
    if sender is not None:
        settings.append([sender.transport, sender.principal, sender.deadline_ns, dict(sender.trace_context)])
    return json.dumps(settings).encode()


def unpack_settings(text: bytes) -> RareSettings:
    """Return the settings that `pack_settings` wrote. Raises `ProtocolError` for anything else."""
    match json.loads(text):
        case [dict() as parameters, int() | str() as sequence_id, dict() as targets]:
            return RareSettings(_scalars(parameters), sequence_id, None, _places(targets))
        case [
            dict() as parameters,
            int() | str() as sequence_id,
            dict() as targets,
            [str(transport), str(principal), int(deadline_ns), dict(trace)],
        ]:
            sender = Caller(transport, principal=principal, deadline_ns=deadline_ns, trace_context=trace)
            return RareSettings(_scalars(parameters), sequence_id, sender, _places(targets))
        case _:
            raise ProtocolError("settings that are not parameters, a sequence id, targets and a sender")


def pack_parameters(parameters: Mapping[str, Parameter]) -> bytes:
    """Return the parameters of a response as JSON."""
    return json.dumps(dict(parameters)).encode()


def unpack_parameters(text: bytes) -> dict[str, Parameter]:
    """Return the parameters that `pack_parameters` wrote. Raises `ProtocolError` for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ProtocolError(f"parameters of type {type(value).__name__}")
    return _scalars(value)


def _places(targets: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    for name, place in targets.items():
        if not isinstance(place, list) or [type(each) for each in place] != [int, int, int]:
            raise ProtocolError(f"a target of '{name}' that is no place")
    return {name: (number, offset, nbytes) for name, (number, offset, nbytes) in targets.items()}


def _scalars(parameters: dict[str, Any]) -> dict[str, Parameter]:
    for key, value in parameters.items():
        if not isinstance(value, str | int | float):
            raise ProtocolError(f"a parameter '{key}' of type {type(value).__name__}")
    return parameters
