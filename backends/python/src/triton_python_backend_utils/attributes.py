"""Checked attributes of requests and responses: flags, parameters, preferred memory, the trace, ids.

Names and numbers are Triton's (docs/spec/behaviours.md section 9.2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import numpy as np

from headrace import InferRequest
from triton_python_backend_utils.arguments import INT64, UINT64, Text, choice, items, text, texts, whole_number
from triton_python_backend_utils.error import TritonModelException
from triton_python_backend_utils.named_tensor import Tensor

if TYPE_CHECKING:
    from headrace import Caller

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1
TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2

Parameter: TypeAlias = "str | int | bool | float"


def checked(parameters: Mapping[str, Parameter] | None) -> dict[str, Parameter]:
    """Return a copy of ``parameters``, empty for None. Raises `TritonModelException` for an invalid one."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect N8pybind114dictE, got {type(parameters)}")  # as Triton's compiler names it
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


class MemoryType(IntEnum):
    """The numbers of Triton's Python backend, which differ from those of the server's C API."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU: Final = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU: Final = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory:
    """The preferred memory for the outputs of a request: the host's, or a GPU's, where a model may produce them."""

    __slots__ = ("_device_id", "_type")

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self._type = choice(preferred_memory_type, MemoryType, "preferred_memory_type")
        self._device_id = whole_number(preferred_device_id, "preferred_device_id", INT64)

    @property
    def _is_host(self) -> bool:
        return self._type is MemoryType.TRITONSERVER_MEMORY_CPU

    def __repr__(self) -> str:
        return f"PreferredMemory({self._type.name}, {self._device_id})"


class InferenceTrace:
    """The trace of a request, for the requests that a model sends in turn."""

    __slots__ = ("_context",)

    def __init__(self) -> None:
        self._context: str | None = None

    @classmethod
    def _of(cls, sender: Caller | None) -> InferenceTrace:
        """Return the trace of a request from ``sender``."""
        trace = cls()
        if sender is not None and sender.trace_context:
            trace._context = json.dumps(dict(sender.trace_context), separators=(",", ":"))
        return trace

    def get_context(self) -> str | None:
        """Return the context of OpenTelemetry as text, None if the request is not traced by it.

        It is a JSON object with the headers ``traceparent`` and, if the caller sent it, ``tracestate``.
        """
        return self._context


def checked_inputs(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs. Raises TypeError. `request_template` refuses an input that is None."""
    found = list(items(inputs, "the inputs of an InferenceRequest"))
    for tensor in found:
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"the inputs of an InferenceRequest must be Tensors, found type '{type(tensor).__name__}'")
    return found


def request_template(
    request_id: Text,
    correlation_id: int | str,
    inputs: Sequence[Tensor],
    requested_output_names: Sequence[Text],
    model_name: Text,
    model_version: int,
    timeout: int,
    parameters: Mapping[str, Parameter] | None,
) -> InferRequest:
    """Return the request, without its inputs and flags. Raises `TritonModelException`, TypeError and
    UnicodeDecodeError.
    """
    log_id, name = text(request_id, "request_id"), text(model_name, "model_name")
    names = texts(requested_output_names, "requested_output_names")
    version = whole_number(model_version, "model_version", INT64)
    timeout_us = whole_number(timeout, "timeout", UINT64)
    sequence = _correlation_id(correlation_id)
    if None in inputs:
        _refuse_empty("Input tensor", log_id, name)
    if "" in names:
        _refuse_empty("Requested output name", log_id, name)
    return InferRequest(
        name,
        {},
        names,
        log_id,
        "" if version < 0 else str(version),
        checked(parameters),
        timeout_us=timeout_us,
        sequence_id=sequence,
    )


def _correlation_id(value: Any) -> int | str:
    """Return the id. Unlike in Triton, integers of NumPy are valid: a model gets correlation ids of this type."""
    if value is None:
        raise TypeError("correlation_id must be an int or a str, found None")
    if isinstance(value, str):
        return text(value, "correlation_id")
    if not isinstance(value, (int, np.integer)):
        raise TritonModelException("Correlation ID must be integer or string")
    if not 0 <= value < 1 << 64:
        raise TritonModelException(f"Correlation ID must be an unsigned integer of 64 bits, found {value}")
    return int(value)


def _refuse_empty(what: str, request_id: str, model_name: str) -> NoReturn:
    raise TritonModelException(
        f"{what} for request with id '{request_id}' and model name '{model_name}' should not be empty."
    )
