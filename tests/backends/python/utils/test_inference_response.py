"""Responses and errors of pb_utils (docs/spec/behaviours.md section 9.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from headrace.errors import Code, HeadraceError, InternalError
from headrace.messages.response import InferResponse
from headrace.messages.tensor import BytesTensor


def y(value: float = 1.0) -> pb_utils.Tensor:
    return pb_utils.Tensor("y", np.array([value]))


def test_a_response_returns_its_constructor_arguments() -> None:
    tensor = y()
    response = pb_utils.InferenceResponse([tensor], parameters={"a": "x", "b": 1})

    assert response.output_tensors() == [tensor]
    assert (response.has_error(), response.error()) == (False, None)
    assert response.parameters() == '{"a": "x", "b": 1}'


def test_response_is_sent_with_its_outputs_in_order() -> None:
    text = pb_utils.Tensor("s", np.array(["a", "b"], object))
    message = pb_utils.InferenceResponse([text, y(2)], parameters={"n": 3})._message()

    assert isinstance(message, InferResponse)
    assert list(message.outputs) == ["s", "y"]
    assert isinstance(message.outputs["s"], BytesTensor)
    assert message.parameters == {"n": 3}


def test_response_may_be_empty() -> None:
    response = pb_utils.InferenceResponse()
    assert response.output_tensors() == []
    assert response.parameters() == "{}"


@pytest.mark.parametrize("code", list(Code)[:8])
def test_an_error_takes_precedence_over_outputs_and_keeps_its_code(code: Code) -> None:
    name = "INVALID_ARG" if code is Code.INVALID_ARGUMENT else code.name
    error = pb_utils.TritonError("no", getattr(pb_utils.TritonError, name))
    message = pb_utils.InferenceResponse([y()], error)._message()

    assert isinstance(message, HeadraceError)
    assert (str(message), message.code) == ("no", code)
    back = pb_utils.InferenceResponse._received(message).error()
    assert back is not None
    assert (back.message(), back.code()) == ("no", error.code())


@pytest.mark.parametrize("code", list(Code)[8:])
def test_the_refusal_of_an_interceptor_has_one_of_tritons_codes(code: Code) -> None:
    error = pb_utils.InferenceResponse._received(HeadraceError("no", code)).error()
    assert error is not None
    unavailable = code is Code.RESOURCE_EXHAUSTED
    assert error.code() == (pb_utils.TritonError.UNAVAILABLE if unavailable else pb_utils.TritonError.INVALID_ARG)


def test_error_codes_have_tritons_numbers() -> None:
    names = [
        "UNKNOWN",
        "INTERNAL",
        "NOT_FOUND",
        "INVALID_ARG",
        "UNAVAILABLE",
        "UNSUPPORTED",
        "ALREADY_EXISTS",
        "CANCELLED",
    ]
    assert [getattr(pb_utils.TritonError, name) for name in names] == list(range(8))
    assert pb_utils.TritonError("m").code() == pb_utils.TritonError.INTERNAL
    assert pb_utils.TritonError("m").message() == "m"


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"output_tensors": [None]}, pb_utils.TritonModelException, "Output tensor for inference response should not"),
        ({"output_tensors": [1]}, TypeError, "found type 'int'"),
        ({"error": "text"}, TypeError, "must be a TritonError, found 'str'"),
        ({"parameters": {"a": [1]}}, pb_utils.TritonModelException, "found type <class 'list'>"),
        ({"parameters": {3: 1}}, pb_utils.TritonModelException, "Expect parameters keys to have type str"),
    ],
)
def test_an_invalid_argument_is_refused(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        pb_utils.InferenceResponse(**arguments)


@pytest.mark.parametrize(("message", "code", "kind"), [(None, 1, TypeError), ("m", 9, TypeError)])
def test_argument_that_makes_no_error_is_refused(message: Any, code: int, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        pb_utils.TritonError(message, code)


def test_response_of_another_model_reads_like_an_own() -> None:
    response = pb_utils.InferenceResponse._received(InferResponse({"y": np.array([4])}, {"k": True}))
    tensor = pb_utils.get_output_tensor_by_name(response, "y")

    assert tensor is not None
    assert tensor.as_numpy().tolist() == [4]
    assert response.parameters() == '{"k": true}'


def test_end_of_a_decoupled_model_is_an_empty_response() -> None:
    response = pb_utils.InferenceResponse._received(None)
    assert (response.output_tensors(), response.has_error()) == ([], False)


def test_an_error_of_the_server_has_its_code() -> None:
    error = pb_utils.InferenceResponse._received(InternalError("broken")).error()
    assert error is not None
    assert (error.code(), error.message()) == (pb_utils.TritonError.INTERNAL, "broken")
