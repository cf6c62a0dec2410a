"""A model that calls other models (docs/spec/behaviours.md section 9.5)."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.runtime import ModelPhase, Runtime

if TYPE_CHECKING:
    from tests.backends.python.utils.conftest import FunctionServices, Recorded

pytestmark = pytest.mark.usefixtures("runtime")


def ask(model: str, value: int = 3, **fields: Any) -> pb_utils.InferenceRequest:
    x = pb_utils.Tensor("x", np.array([value], np.int32))
    return pb_utils.InferenceRequest(inputs=[x], requested_output_names=["y"], model_name=model, **fields)


def outputs(responses: Iterator[pb_utils.InferenceResponse]) -> list[int | None]:
    """One number per response; None for an empty one."""
    tensors = [pb_utils.get_output_tensor_by_name(response, "y") for response in responses]
    return [None if tensor is None else int(tensor.as_numpy()[0]) for tensor in tensors]


def test_a_call_returns_the_response() -> None:
    response = ask("double").exec()

    assert not response.has_error()
    assert outputs(iter([response])) == [6]
    assert response.parameters() == '{"model": "double"}'


def test_request_is_sent_whole(services: FunctionServices) -> None:
    ask(
        "double",
        request_id="q",
        correlation_id=7,
        model_version=2,
        flags=3,
        timeout=250,
        parameters={"k": "v"},
    ).exec()

    (sent,) = services.requests
    assert (sent.model_name, sent.model_version, sent.id, sent.outputs) == ("double", "2", "q", ("y",))
    assert (sent.sequence_id, sent.sequence_start, sent.sequence_end) == (7, True, True)
    assert (sent.timeout_us, sent.parameters, sent.callers) == (250, {"k": "v"}, ("asker",))


def test_inputs_are_sent_as_the_server_takes_them(services: FunctionServices) -> None:
    """Even from a model in a thread, whose arrays go to the other model as they are."""
    array = np.array([3], np.longlong).view(np.memmap)
    inputs = [pb_utils.Tensor("x", array)]
    pb_utils.InferenceRequest(inputs=inputs, requested_output_names=["y"], model_name="double").exec()

    (sent,) = services.requests
    assert type(sent.inputs["x"]) is np.ndarray
    assert sent.inputs["x"].dtype is np.dtype(np.int64)


def test_without_a_version_the_server_chooses(services: FunctionServices) -> None:
    ask("double").exec()
    assert services.requests[0].model_version == ""


def test_one_request_can_be_executed_again(services: FunctionServices) -> None:
    request = ask("double")
    assert outputs(iter([request.exec(), request.exec()])) == [6, 6]
    assert services.requests[0] is not services.requests[1]


def test_other_model_cannot_write_to_the_inputs(services: FunctionServices, recorded: type[Recorded]) -> None:
    def write(request: InferRequest) -> Iterator[Answer]:
        tensor = pb_utils.get_input_tensor_by_name(
            pb_utils.InferenceRequest._received(recorded(request.inputs), Runtime("writer")),  # type: ignore[arg-type]
            "x",
        )
        assert tensor is not None
        array = tensor.as_numpy()
        array += 100
        yield InferResponse({"y": array})

    services.models = {"writer": write}
    x = pb_utils.Tensor("x", np.array([1]))
    request = pb_utils.InferenceRequest(inputs=[x], requested_output_names=[], model_name="writer")

    assert outputs(iter([request.exec()])) == [101]
    assert x.as_numpy().tolist() == [1]
    x.as_numpy()[0] = 5


@pytest.mark.parametrize(("model", "text"), [("refuse", "no room"), ("nope", "model 'nope' is not found")])
def test_an_error_is_in_the_response(model: str, text: str) -> None:
    for response in (ask(model).exec(), *ask(model).exec(decoupled=True), asyncio.run(awaited(model))):
        error = response.error()
        assert response.has_error()
        assert error is not None
        assert error.message() == text


async def awaited(model: str) -> pb_utils.InferenceResponse:
    return await ask(model).async_exec()


def test_a_duplicate_input_is_refused_in_the_response(services: FunctionServices) -> None:
    x = pb_utils.Tensor("x", np.zeros(1))
    request = pb_utils.InferenceRequest(inputs=[x, x], requested_output_names=[], model_name="double")

    error = request.exec().error()
    assert error is not None
    assert error.message() == (
        "Model double - Error when running inference: [request id: <id_unknown>] input 'x' already exists in request"
    )
    assert services.requests == []


def test_decoupled_responses_arrive_one_by_one_with_an_empty_last(services: FunctionServices) -> None:
    responses = ask("count", 3).exec(decoupled=True)

    assert outputs(responses) == [0, 1, 2, None]
    assert len(services.reads) == 3
    assert services.cancelled == []


def test_responses_can_be_iterated_again() -> None:
    responses = ask("count", 2).exec(decoupled=True)
    assert outputs(responses) == outputs(responses) == [0, 1, None]


def test_plain_model_gives_an_iterator_one_response() -> None:
    assert outputs(ask("double").exec(decoupled=True)) == [6]


def test_closing_or_cancelling_the_iterator_cancels_the_request(services: FunctionServices) -> None:
    responses = ask("count", 5).exec(decoupled=True)
    next(responses)
    responses.cancel()
    assert (services.stopped, services.cancelled) == (services.tickets, [])
    assert outputs(responses) == [1, 2, 3, 4, None]
    responses.cancel()
    assert len(services.stopped) == 1

    dropped = ask("count", 5).exec(decoupled=True)
    next(dropped)
    del dropped
    gc.collect()
    assert services.cancelled == services.tickets[1:]


def test_calls_of_a_loop_overlap_without_threads(services: FunctionServices) -> None:
    arrived = threading.Barrier(3)

    def wait_for_all(request: InferRequest) -> Iterator[Answer]:
        arrived.wait(20)
        yield InferResponse({"y": request.inputs["x"]})  # type: ignore[dict-item]

    async def main() -> list[pb_utils.InferenceResponse]:
        threads = threading.active_count()
        futures = [ask("meet", value).async_exec() for value in range(3)]
        responses = await asyncio.gather(*futures)
        assert threading.active_count() <= threads + 3  # those of the models
        return responses

    services.models = {"meet": wait_for_all}
    assert outputs(iter(asyncio.run(main()))) == [0, 1, 2]


def test_decoupled_responses_can_be_awaited() -> None:
    async def main() -> list[int | None]:
        return outputs(await ask("count", 2).async_exec(decoupled=True))

    assert asyncio.run(main()) == [0, 1, None]


def test_cancelled_future_cancels_its_request(services: FunctionServices) -> None:
    gate = threading.Event()

    def wait(request: InferRequest) -> Iterator[Answer]:
        gate.wait(20)
        yield None

    async def main(decoupled: bool) -> None:
        future = ask("wait").async_exec(decoupled=decoupled)
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future

    services.models = {"wait": wait}
    for decoupled in (False, True):
        asyncio.run(main(decoupled))
    assert services.cancelled == services.tickets
    gate.set()


def test_async_exec_needs_a_loop(services: FunctionServices) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        ask("double").async_exec()
    assert services.requests == []


@pytest.mark.parametrize("phase", [ModelPhase.COMPLETING, ModelPhase.INITIALIZING, ModelPhase.FINALIZING])
def test_only_execute_can_ask(runtime: Runtime, phase: ModelPhase) -> None:
    runtime.phase = phase
    request = ask("double")
    for call in (request.exec, lambda: request.exec(decoupled=True), request.async_exec):
        with pytest.raises(
            pb_utils.TritonModelException, match=r"^BLS is only supported during the 'execute' function\.$"
        ):
            call()


def test_calls_without_a_server_are_refused() -> None:
    def ask_alone() -> None:
        assert runtimes.current() is None
        with pytest.raises(pb_utils.TritonModelException, match="BLS is only supported"):
            ask("double").exec()

    contextvars.Context().run(ask_alone)


def test_a_thread_can_send_a_request_of_execute() -> None:
    request, answers = ask("double"), []
    thread = threading.Thread(target=lambda: answers.append(request.exec()))
    thread.start()
    thread.join(20)
    assert outputs(iter(answers)) == [6]


def test_request_names_all_that_wait_for_it(runtime: Runtime, services: FunctionServices) -> None:
    with runtime.entered(("outer", "middle")):
        ask("double").exec()
    assert services.requests[0].callers == ("outer", "middle", "asker")


def test_a_request_can_be_passed_on(runtime: Runtime, services: FunctionServices, recorded: type[Recorded]) -> None:
    call = recorded({"x": np.array([4])}, model="double", outputs=("y",), callers=("outer",))
    request = pb_utils.InferenceRequest._received(call, runtime)

    assert outputs(iter([request.exec()])) == [8]
    assert services.requests[0].callers == ("outer", "asker")
    assert call.answers == []


def test_a_client_that_disconnects_does_not_break_a_call(runtime: Runtime, recorded: type[Recorded]) -> None:
    call = recorded()
    request = pb_utils.InferenceRequest._received(call, runtime)
    call.ticket.cancel()

    assert request.is_cancelled()
    assert outputs(iter([ask("double").exec()])) == [6]
