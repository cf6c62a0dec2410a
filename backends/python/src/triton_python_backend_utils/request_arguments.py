"""The arguments of a request that a model makes, checked.

Source: docs/spec/behaviours.md section 9.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from headrace import InferRequest
from triton_python_backend_utils.arguments import INT64, UINT64, Text, items, text, texts, whole_number
from triton_python_backend_utils.attributes import Parameter, checked
from triton_python_backend_utils.error import TritonModelException
from triton_python_backend_utils.tensor import Tensor


def checked_inputs(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs; one that is None is left to `request_template`. Raises TypeError."""
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
    """The request, without its inputs and flags. Raises `TritonModelException`, TypeError and UnicodeDecodeError."""
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


def _correlation_id(given: Any) -> int | str:
    """NumPy's integers, too, which Triton refuses: they are what a model has of a correlation id it was sent."""
    if given is None:
        raise TypeError("correlation_id must be an int or a str, found None")
    if isinstance(given, str):
        return text(given, "correlation_id")
    if not isinstance(given, (int, np.integer)):
        raise TritonModelException("Correlation ID must be integer or string")
    if not 0 <= given < 1 << 64:
        raise TritonModelException(f"Correlation ID must be an unsigned integer of 64 bits, found {given}")
    return int(given)


def _refuse_empty(what: str, request_id: str, model_name: str) -> NoReturn:
    raise TritonModelException(
        f"{what} for request with id '{request_id}' and model name '{model_name}' should not be empty."
    )
