"""Parameters of requests, inputs and outputs in protobuf.

Source: docs/spec/behaviours.md section 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import InvalidArgument, PluginError
from headrace.frontends.request_parameters import EMPTY_FINAL, UINT64_MAX, ParameterReader
from headrace.messages.request import Parameter
from headrace_grpc.grpc_service_pb2 import InferParameter

_CUSTOM_KINDS = ("int64_param", "bool_param", "string_param", "double_param")
_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


def _boolean(value: InferParameter, name: str) -> bool:
    if value.WhichOneof("parameter_choice") != "bool_param":
        raise InvalidArgument(f"invalid value type for '{name}' parameter, expected bool_param.")
    return value.bool_param


def _sequence_id(value: InferParameter, name: str) -> int | str:
    kind = value.WhichOneof("parameter_choice")
    if kind == "int64_param":
        return value.int64_param & UINT64_MAX
    if kind == "string_param":
        return value.string_param
    raise InvalidArgument(f"invalid value type for '{name}' parameter, expected int64_param or string_param.")


def _priority(value: InferParameter, name: str) -> int:
    kind = value.WhichOneof("parameter_choice")
    if kind == "uint64_param":
        return value.uint64_param
    if kind != "int64_param":
        raise InvalidArgument(f"invalid value type for '{name}' parameter, expected int64_param or uint64_param.")
    return _not_negative(value, name)


def _timeout(value: InferParameter, name: str) -> int:
    if value.WhichOneof("parameter_choice") != "int64_param":
        raise InvalidArgument(f"invalid value type for '{name}' parameter, expected int64_param.")
    return _not_negative(value, name)


def _not_negative(value: InferParameter, name: str) -> int:
    number = value.int64_param
    if number < 0:
        raise InvalidArgument(f"invalid value for '{name}', expected value >= 0.")
    return number


def custom(value: InferParameter, name: str) -> Parameter:
    """Return the value of the parameter ``name``. Raises `InvalidArgument` for a kind that is not taken."""
    kind = value.WhichOneof("parameter_choice")
    if kind not in _CUSTOM_KINDS:
        raise InvalidArgument(
            f"invalid value type for '{name}' parameter, expected int64_param, bool_param, or string_param."
        )
    parameter: Parameter = getattr(value, kind)
    return parameter


#: Reads the parameters of a ``ModelInferRequest``.
read = ParameterReader[InferParameter](EMPTY_FINAL, _boolean, _sequence_id, _priority, _timeout, custom).read


def classes(parameters: Mapping[str, InferParameter]) -> int:
    """Return the number of classes that ``classification`` of an output requests; 0 if it is missing."""
    value = parameters.get("classification")
    if value is None:
        return 0
    if value.WhichOneof("parameter_choice") != "int64_param":
        raise InvalidArgument("invalid value type for 'classification' parameter, expected int64_param")
    if value.int64_param <= 0:
        raise InvalidArgument("invalid value for 'classification' parameter, expected >= 0")
    return value.int64_param


def shared_memory_region(tensor: str, parameters: Mapping[str, InferParameter]) -> str | None:
    """Return the region that ``parameters`` of tensor ``tensor`` name, or None.

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
        if key == "sequence_id" and isinstance(value, int) and value > UINT64_MAX >> 1:
            value -= UINT64_MAX + 1  # as in requests: an unsigned value in a signed field
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


def _require(tensor: str, key: str, value: InferParameter, kind: str) -> None:
    if value.WhichOneof("parameter_choice") != kind:
        raise InvalidArgument(f"invalid value type for '{key}' parameter for tensor '{tensor}', expected {kind}.")
