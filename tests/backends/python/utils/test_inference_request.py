"""Requests, received and made; texts and values are those of a real Triton 2.51.

Source: docs/spec/behaviours.md section 9.2.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from triton_python_backend_utils.runtime import Runtime

if TYPE_CHECKING:
    from tests.backends.python.utils.conftest import Recorded


def made(**fields: Any) -> pb_utils.InferenceRequest:
    defaults: dict[str, Any] = {
        "inputs": [pb_utils.Tensor("x", np.zeros(2, np.float32))],
        "requested_output_names": ["y"],
        "model_name": "other",
    }
    return pb_utils.InferenceRequest(**(defaults | fields))


def received(call: Recorded) -> pb_utils.InferenceRequest:
    return pb_utils.InferenceRequest._received(call, Runtime("counted"))


def test_a_received_request_has_the_fields_of_the_caller(recorded: type[Recorded]) -> None:
    call = recorded(
        {"x": np.ones(2), "n": np.zeros(3, np.int32)},
        id="q1",
        outputs=("y", "z"),
        model_version="3",
        parameters={"k": "v", "n": 3, "b": True, "f": 1.5},
        timeout_us=250,
        sequence_id="room",
        sequence_end=True,
    )
    request = received(call)

    assert [tensor.name() for tensor in request.inputs()] == ["x", "n"]
    assert request.inputs() is request.inputs()
    assert request.request_id() == "q1"
    assert request.requested_output_names() == {"y", "z"}
    assert request.parameters() == '{"k":"v","n":3,"b":true,"f":1.5}'
    assert request.timeout() == 250
    assert request.correlation_id() == "room"
    assert request.flags() == pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
    assert (request.model_name(), request.model_version()) == ("counted", 3)
    assert request.trace().get_context() is None


def test_made_request_has_tritons_defaults() -> None:
    request = made()

    assert (request.request_id(), request.correlation_id(), request.flags(), request.timeout()) == ("", 0, 0, 0)
    assert (request.parameters(), request.model_version()) == ("{}", -1)
    assert request.trace().get_context() is None
    assert not request.is_cancelled()


def test_arguments_are_in_tritons_order() -> None:
    trace = pb_utils.InferenceTrace()
    memory = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 1)
    tensor = pb_utils.Tensor("x", np.zeros(1))
    request = pb_utils.InferenceRequest("id", 5, [tensor], ["y"], "other", 1, 3, 4, memory, trace, {"a": 1})

    assert request.inputs() == [tensor]
    assert (request.request_id(), request.correlation_id(), request.model_version()) == ("id", 5, 1)
    assert (request.flags(), request.timeout(), request.parameters()) == (3, 4, '{"a": 1}')
    assert request.trace() is trace


def test_flags_can_be_set(recorded: type[Recorded]) -> None:
    call = recorded(sequence_start=True)
    for request in (made(flags=1), received(call)):
        assert request.flags() == 1
        request.set_flags(2)
        assert request.flags() == 2
    assert call.request.sequence_start
    assert not call.request.sequence_end


def test_parameters_are_json_text() -> None:
    assert json.loads(made(parameters={"a": "x", "b": 1, "c": True}).parameters()) == {"a": "x", "b": 1, "c": True}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"inputs": [None]}, "Input tensor for request with id '' and model name 'other' should not be empty."),
        (
            {"requested_output_names": [""], "request_id": "q"},
            "Requested output name for request with id 'q' and model name 'other' should not be empty.",
        ),
        ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
        ({"correlation_id": -1}, "Correlation ID must be an unsigned integer of 64 bits, found -1"),
        (
            {"parameters": {"a": 1.5}},
            "Expect parameters values to have type bool/int/str, found type <class 'float'>",
        ),
        ({"parameters": {1: 1}}, "Expect parameters keys to have type str, found type <class 'int'>"),
        ({"parameters": [1]}, "Expect N8pybind114dictE, got <class 'list'>"),
    ],
)
def test_argument_that_makes_no_request_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(pb_utils.TritonModelException) as refusal:
        made(**fields)
    assert str(refusal.value) == text


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": [1]},
        {"inputs": None},
        {"requested_output_names": None},
        {"model_name": None},
        {"model_name": 3},
        {"request_id": 3},
        {"timeout": "1"},
        {"model_version": "1"},
    ],
)
def test_argument_of_another_type_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        made(**fields)


def test_negative_timeout_is_refused() -> None:
    with pytest.raises(TypeError, match="timeout must be from 0 to 18446744073709551615, found -1"):
        made(timeout=-1)


def test_request_that_the_model_made_has_no_sender() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="has no response sender"):
        made().get_response_sender()


def test_request_is_rescheduled_by_its_release_flags(recorded: type[Recorded]) -> None:
    request = received(recorded())
    seen = [request._rescheduled]
    for flags in (pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL):
        request.set_release_flags(flags)
        seen.append(request._rescheduled)
    assert seen == [False, True, False]


def test_received_inputs_are_views(recorded: type[Recorded]) -> None:
    x = np.arange(4)
    tensor = pb_utils.get_input_tensor_by_name(received(recorded({"x": x})), "x")
    assert tensor is not None
    assert np.shares_memory(tensor.as_numpy(), x)
