"""Parameters of requests, inputs and outputs: their types, and which have a meaning.

Source: docs/spec/behaviours.md section 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.errors import InvalidArgument, PluginError
from headrace.frontends.grpc.grpc_service_pb2 import InferParameter
from headrace.messages.request import Parameter

_EMPTY_FINAL = "triton_enable_empty_final_response"
_CUSTOM_KINDS = ("int64_param", "bool_param", "string_param", "double_param")
_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


@dataclass(slots=True)
class RequestParameters:
    """The parameters of one request. Those without a meaning of their own are ``custom``."""

    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    empty_final: bool = False
    custom: dict[str, Parameter] = field(default_factory=dict)


def read(parameters: Mapping[str, InferParameter]) -> RequestParameters:
    """The parameters of a ``ModelInferRequest``; raises `InvalidArgument` for a wrong type."""
    result = RequestParameters()
    if not parameters:  # asking costs less than iterating over nothing
        return result
    for key, value in parameters.items():
        if key == "sequence_id":
            result.sequence_id = _sequence_id(value)
        elif key == "sequence_start":
            result.sequence_start = _bool(key, value)
        elif key == "sequence_end":
            result.sequence_end = _bool(key, value)
        elif key == "priority":
            result.priority = _priority(value)
        elif key == "timeout":
            result.timeout_us = _timeout(value)
        elif key.startswith("triton_"):
            result.empty_final = _reserved(key, value)
        else:
            result.custom[key] = _custom(key, value)
    return result


def classes(parameters: Mapping[str, InferParameter]) -> int:
    """How many classes a requested output's ``classification`` asks for; 0 if it does not."""
    value = parameters.get("classification")
    if value is None:
        return 0
    if value.WhichOneof("parameter_choice") != "int64_param":
        raise InvalidArgument("invalid value type for 'classification' parameter, expected int64_param")
    if value.int64_param <= 0:
        raise InvalidArgument("invalid value for 'classification' parameter, expected >= 0")
    return value.int64_param


def shared_memory_region(tensor: str, parameters: Mapping[str, InferParameter]) -> str | None:
    """The region that ``parameters`` of tensor ``tensor`` name, or None if they name none.

    Raises `InvalidArgument` for a wrong type and for an incomplete set.
    """
    region = parameters.get(_REGION)
    if region is None:
        for key in (_OFFSET, _SIZE):
            if key in parameters:
                raise InvalidArgument(
                    f"'{key}' can not be specified without 'shared_memory_region' parameter for tensor '{tensor}'"
                )
        return None
    _require(tensor, _REGION, region, "string_param")
    if _OFFSET in parameters:
        _require(tensor, _OFFSET, parameters[_OFFSET], "int64_param")
    if _SIZE not in parameters:
        raise InvalidArgument(
            f"'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
            f"'{tensor}'"
        )
    _require(tensor, _SIZE, parameters[_SIZE], "int64_param")
    return region.string_param


def write(parameters: Mapping[str, Parameter], target: Mapping[str, InferParameter]) -> None:
    """Add ``parameters`` of a response to the map field ``target``.

    Raises `PluginError` for a value that the protocol cannot carry.
    """
    for key, value in parameters.items():
        try:
            _set(target[key], value)
        except (TypeError, ValueError) as error:
            raise PluginError(f"response parameter '{key}' can not be sent: {error}") from error


def _set(target: InferParameter, value: Parameter) -> None:
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        target.int64_param = value
    elif isinstance(value, float):
        target.double_param = value
    else:
        target.string_param = value


def _sequence_id(value: InferParameter) -> int | str:
    kind = value.WhichOneof("parameter_choice")
    if kind == "int64_param":
        return value.int64_param & (1 << 64) - 1  # the core's correlation ids are uint64
    if kind == "string_param":
        return value.string_param
    raise InvalidArgument("invalid value type for 'sequence_id' parameter, expected int64_param or string_param.")


def _bool(key: str, value: InferParameter) -> bool:
    if value.WhichOneof("parameter_choice") != "bool_param":
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected bool_param.")
    return value.bool_param


def _priority(value: InferParameter) -> int:
    kind = value.WhichOneof("parameter_choice")
    if kind == "uint64_param":
        return value.uint64_param
    if kind != "int64_param":
        raise InvalidArgument("invalid value type for 'priority' parameter, expected int64_param or uint64_param.")
    if value.int64_param < 0:
        raise InvalidArgument("invalid value for 'priority', expected value >= 0.")
    return value.int64_param


def _timeout(value: InferParameter) -> int:
    if value.WhichOneof("parameter_choice") != "int64_param":
        raise InvalidArgument("invalid value type for 'timeout' parameter, expected int64_param.")
    if value.int64_param < 0:
        raise InvalidArgument("invalid value for 'timeout', expected value >= 0.")
    return value.int64_param


def _reserved(key: str, value: InferParameter) -> bool:
    if key != _EMPTY_FINAL:
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
            f"with 'triton_' are allowed: {_EMPTY_FINAL}"
        )
    return _bool(key, value)


def _custom(key: str, value: InferParameter) -> Parameter:
    kind = value.WhichOneof("parameter_choice")
    if kind not in _CUSTOM_KINDS:
        raise InvalidArgument(
            f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or string_param."
        )
    parameter: Parameter = getattr(value, kind)
    return parameter


def _require(tensor: str, key: str, value: InferParameter, kind: str) -> None:
    if value.WhichOneof("parameter_choice") != kind:
        raise InvalidArgument(f"invalid value type for '{key}' parameter for tensor '{tensor}', expected {kind}.")
