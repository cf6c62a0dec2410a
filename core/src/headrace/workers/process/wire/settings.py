"""The settings that few requests have, and the parameters of responses: as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.messages.request import InferRequest, Parameter
from headrace.workers.process.wire.failure import WireError


def pack(request: InferRequest) -> bytes:
    """The parameters and the sequence of ``request``."""
    return json.dumps([dict(request.parameters), request.sequence_id]).encode()


def apply(text: bytes, request: InferRequest) -> None:
    """Set what `pack` wrote. Raises `WireError` for anything else."""
    match json.loads(text):
        case [dict() as parameters, int() | str() as sequence_id]:
            request.parameters, request.sequence_id = _scalars(parameters), sequence_id
        case _:
            raise WireError("settings that are none")


def pack_parameters(parameters: Mapping[str, Parameter]) -> bytes:
    """The parameters of a response."""
    return json.dumps(dict(parameters)).encode()


def unpack(text: bytes) -> dict[str, Parameter]:
    """What `pack_parameters` wrote. Raises `WireError` for anything else."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise WireError(f"parameters of type {type(found).__name__}")
    return _scalars(found)


def _scalars(parameters: dict[str, Any]) -> dict[str, Parameter]:
    for key, value in parameters.items():
        if not isinstance(value, str | int | float):
            raise WireError(f"a parameter '{key}' of type {type(value).__name__}")
    return parameters
