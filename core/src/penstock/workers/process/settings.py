"""The settings that few requests have, as JSON: parameters, a sequence, callers, the model asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.messages.request import InferRequest, Parameter
from penstock.workers.process.failure import WireError


def pack(request: InferRequest, addressed: bool) -> bytes:
    """The settings that few requests have, as JSON; nothing for most. ``addressed``: and the model."""
    if not (addressed or request.parameters or request.sequence_id or request.callers):
        return b""
    found: dict[str, object] = {}
    if addressed:
        found.update(model_name=request.model_name, model_version=request.model_version, decoupled=request.decoupled)
        found["caller"] = getattr(request.caller, "call", 0)
    if request.parameters:
        found["parameters"] = dict(request.parameters)
    if request.sequence_id:
        found["sequence_id"] = request.sequence_id
    if request.callers:
        found["callers"] = request.callers
    return json.dumps(found).encode()


def pack_parameters(parameters: Mapping[str, Parameter]) -> bytes:
    """The parameters of a response."""
    return json.dumps({"parameters": dict(parameters)}).encode()


def unpack(text: bytes) -> dict[str, Any]:
    """What `pack` or `pack_parameters` wrote. Raises `WireError`."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise WireError(f"settings of type {type(found).__name__}")
    return found


def parameters_of(rare: Mapping[str, Any]) -> dict[str, Parameter]:
    """The parameters among unpacked settings. Raises `WireError` for a value that is no scalar."""
    return {key: _checked(value, str, int, float) for key, value in rare.get("parameters", {}).items()}


def apply(rare: dict[str, Any], request: InferRequest) -> None:
    """Set what `pack` wrote. Raises `WireError` for anything else."""
    match rare:
        case {"model_version": str(version), "decoupled": bool(decoupled)}:
            request.model_version, request.decoupled = version, decoupled
    request.sequence_id = _checked(rare.get("sequence_id", 0), int, str)
    request.callers = tuple(_checked(name, str) for name in rare.get("callers", ()))
    request.parameters = parameters_of(rare)


def _checked(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise WireError(f"a request with a setting of type {type(value).__name__}")
    return value
