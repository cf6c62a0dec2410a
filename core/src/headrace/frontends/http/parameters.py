"""The ``parameters`` of an infer request: Triton's own, and those that travel to the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import InvalidArgument
from headrace.frontends.http.documents import as_boolean, as_object, as_unsigned, wrong_type
from headrace.frontends.http.output_format import BINARY, JSON, OutputFormat
from headrace.messages.request import Parameter

_MAX_CORRELATION_ID = 128
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_UINT64_MAX = 2**64 - 1


@dataclass(slots=True)
class DocumentParameters:
    """The parameters of one request. Those without a meaning of their own are ``custom``.

    ``default`` is the format of outputs that are not listed.
    """

    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    default: OutputFormat = JSON
    custom: Mapping[str, Parameter] = field(default_factory=dict)


def read_parameters(parameters: Any) -> DocumentParameters:
    """What ``parameters`` say. Raises `InvalidArgument`."""
    result, custom = DocumentParameters(), {}
    for name, value in as_object(parameters, "parameters").items():
        if name == "binary_data_output":
            result.default = BINARY if as_boolean(value, name) else JSON
        elif name == "sequence_id":
            result.sequence_id = _sequence_id(value)
        elif name == "sequence_start":
            result.sequence_start = as_boolean(value, name)
        elif name == "sequence_end":
            result.sequence_end = as_boolean(value, name)
        elif name == "priority":
            result.priority = as_unsigned(value, name)
        elif name == "timeout":
            result.timeout_us = as_unsigned(value, name)
        elif name.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        else:
            custom[name] = _custom(name, value)
    result.custom = custom
    return result


def _sequence_id(value: Any) -> int | str:
    if type(value) is int and 0 <= value <= _UINT64_MAX:
        return value
    if type(value) is not str:
        raise wrong_type("sequence_id", "string", "string")
    if len(value.encode(errors="replace")) > _MAX_CORRELATION_ID:
        raise InvalidArgument(f"string correlation ID cannot be longer than {_MAX_CORRELATION_ID} characters")
    return value


def _custom(name: str, value: Any) -> Parameter:
    if type(value) is int:
        # An integer that int64 cannot hold is a double to the parser that Triton uses.
        return value if _INT64_MIN <= value <= _INT64_MAX else float(value)
    if type(value) in (str, bool, float):
        return value  # type: ignore[no-any-return]
    raise InvalidArgument(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")
