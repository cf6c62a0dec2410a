"""The arguments of a request that a model makes, checked.

Source: behaviours.md section 9.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.messages.request import InferRequest
from penstock.messages.response import Answer
from triton_python_backend_utils.error import TritonModelException
from triton_python_backend_utils.parameters import Parameter, checked
from triton_python_backend_utils.tensor import Tensor


def made_request(
    request_id: str,
    correlation_id: int | str,
    inputs: Sequence[Tensor],
    requested_output_names: Sequence[str],
    model_name: str,
    model_version: int,
    timeout: int,
    parameters: Mapping[str, Parameter] | None,
) -> InferRequest:
    """The request, without its inputs and flags. Raises `TritonModelException`, TypeError and ValueError."""
    _check_texts(request_id, model_name)
    _check_numbers(model_version, timeout)
    _check_correlation_id(correlation_id)
    _check_tensors(inputs, request_id, model_name)
    if "" in requested_output_names:
        raise TritonModelException(
            f"Requested output name for request with id '{request_id}' and model name '{model_name}' "
            "should not be empty."
        )
    return InferRequest(
        model_name,
        {},
        _nobody,
        tuple(requested_output_names),
        request_id,
        "" if model_version < 0 else str(model_version),
        checked(parameters),
        timeout_us=timeout,
        sequence_id=correlation_id,
    )


def _check_texts(request_id: str, model_name: str) -> None:
    for what, value in (("request_id", request_id), ("model_name", model_name)):
        if not isinstance(value, str):
            raise TypeError(f"{what} must be a str, found type '{type(value).__name__}'")


def _check_numbers(model_version: int, timeout: int) -> None:
    for what, value in (("model_version", model_version), ("timeout", timeout)):
        if not isinstance(value, int):
            raise TypeError(f"{what} must be an int, found type '{type(value).__name__}'")
    if timeout < 0:
        raise ValueError(f"timeout must not be negative, found {timeout} microseconds")


def _check_correlation_id(correlation_id: int | str) -> None:
    if not isinstance(correlation_id, (int, str)) or isinstance(correlation_id, bool):
        raise TritonModelException("Correlation ID must be integer or string")
    if isinstance(correlation_id, int) and not 0 <= correlation_id < 1 << 64:
        raise TritonModelException(f"Correlation ID must be an unsigned integer of 64 bits, found {correlation_id}")


def _check_tensors(inputs: Sequence[Tensor], request_id: str, model_name: str) -> None:
    for tensor in inputs:
        if tensor is None:
            raise TritonModelException(
                f"Input tensor for request with id '{request_id}' and model name '{model_name}' should not be empty."
            )
        if not isinstance(tensor, Tensor):
            raise TypeError(f"the inputs of an InferenceRequest must be Tensors, found type '{type(tensor).__name__}'")


def _nobody(answer: Answer, final: bool) -> None:
    """The template of a request is never answered; what is made of it for each execution is."""
