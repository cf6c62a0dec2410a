"""Executions of an instance that takes device tensors: the tensors that stay on the device, and the number of
copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from headrace.backends.base import Instance, Tensors
from headrace.errors import BackendError
from headrace.executors.instance import run_batch, runner_for, shaping_of
from headrace.executors.output_schema import OutputSchema
from headrace.executors.ragged import RaggedRunner
from headrace.messages import dtypes
from headrace.messages.device_tensor import DeviceTensor, StackedTensors
from headrace.messages.response import InferResponse
from headrace.messages.spec import Spec
from headrace.messages.ticket import Ticket
from headrace_testing.played_tensors import PlayedDeviceTensor
from tests.core.conftest import make_ticket

SCHEMA = OutputSchema("m", "1", {name: Spec(name, dtypes.FP32, (2,)) for name in ("y", "z")}, True)


class OnDevice(Instance):
    """``y`` is twice ``x``, and ``z`` is three times ``x``, on the device."""

    takes_device_tensors = True

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.copies: list[tuple[int, ...]] = []

    def execute(self, inputs: Tensors) -> Tensors:
        tensor: Any = inputs["x"]
        self.received.append(tensor)
        parts = tensor.parts if isinstance(tensor, StackedTensors) else [tensor]
        x = np.concatenate([part.memory if isinstance(part, PlayedDeviceTensor) else part for part in parts])
        if (x == 13).any():
            raise ValueError("unlucky")
        made: Any = {name: PlayedDeviceTensor(by * x, self.copies) for name, by in (("y", 2), ("z", 3))}
        return made  # type: ignore[no-any-return]


def ticket(x: Any, on_device: Mapping[str, bool] | None = None, outputs: tuple[str, ...] = ()) -> Ticket:
    made = make_ticket("m", {"x": x}, outputs=outputs, rows=len(x.shape) and x.shape[0])
    if on_device is not None:
        made.on_device = on_device
    return made


def rows(*values: float) -> Any:
    return np.array([[value, value] for value in values], np.float32)


def outputs(answer: object) -> Mapping[str, Any]:
    assert isinstance(answer, InferResponse), answer
    return answer.outputs


def test_a_client_gets_arrays_that_are_copied_once_per_batch() -> None:
    instance = OnDevice()
    answers, _ = run_batch(runner_for(instance, SCHEMA), [ticket(rows(1)), ticket(rows(2, 3))])
    (stacked,) = instance.received  # core has no memory from which a device copies: the instance stacks
    assert [type(each) for each in stacked.parts] == [np.ndarray] * 2
    assert [type(each) for each in outputs(answers[1]).values()] == [np.ndarray] * 2
    assert outputs(answers[1])["z"].tolist() == [[6, 6], [9, 9]]
    assert instance.copies == [(3, 2), (3, 2)]


def test_an_output_that_was_not_requested_is_not_copied() -> None:
    instance = OnDevice()
    (answer,), _ = run_batch(runner_for(instance, SCHEMA), [ticket(rows(1), outputs=("z",))])
    assert list(outputs(answer)) == ["z"]
    assert len(instance.copies) == 1


def test_results_on_host_is_false_if_a_caller_takes_results_on_the_device() -> None:
    instance = OnDevice()
    runner = runner_for(instance, SCHEMA)
    for on_device, wants in (((None, None), False), ((None, {"y": True}), True), ((None,), False)):
        run_batch(runner, [ticket(rows(1), each) for each in on_device])
        assert instance.wants_device_tensors is wants


def test_output_that_stays_on_the_device_is_not_copied() -> None:
    instance, tensor = OnDevice(), PlayedDeviceTensor(rows(1))
    (answer,), _ = run_batch(runner_for(instance, SCHEMA), [ticket(tensor, {"y": False}, ("y",))])
    assert instance.received == [tensor]
    output = outputs(answer)["y"]
    assert isinstance(output, PlayedDeviceTensor)
    assert (instance.copies, tensor.copies) == ([], [])
    assert output.memory.tolist() == [[2, 2]]


def test_an_output_for_both_is_copied_once_and_the_copy_waits_with_it() -> None:
    instance = OnDevice()
    (answer,), _ = run_batch(runner_for(instance, SCHEMA), [ticket(rows(1), {"y": True})])
    assert type(outputs(answer)["z"]) is np.ndarray
    assert len(instance.copies) == 2
    output = outputs(answer)["y"]
    assert isinstance(output, DeviceTensor)
    assert output.to_host().tolist() == [[2, 2]]
    assert len(instance.copies) == 2


def test_requests_of_a_batch_get_their_rows_on_the_host_or_the_device() -> None:
    instance, tensor = OnDevice(), PlayedDeviceTensor(rows(1))
    batch = [ticket(tensor, {"y": False}, ("y",)), ticket(rows(2, 3), None, ("y",))]
    answers, _ = run_batch(runner_for(instance, SCHEMA), batch)
    (stacked,) = instance.received
    assert isinstance(stacked, StackedTensors)
    assert stacked.shape == (3, 2)
    assert isinstance(outputs(answers[0])["y"], PlayedDeviceTensor)
    assert outputs(answers[0])["y"].memory.tolist() == [[2, 2]]
    assert type(outputs(answers[1])["y"]) is np.ndarray
    assert outputs(answers[1])["y"].tolist() == [[4, 4], [6, 6]]
    assert instance.copies == [(3, 2)]
    assert tensor.copies == []


def test_a_request_that_fails_fails_alone() -> None:
    instance = OnDevice()
    batch = [ticket(PlayedDeviceTensor(rows(value)), {"y": False}, ("y",)) for value in (1, 13, 2)]
    answers, _ = run_batch(runner_for(instance, SCHEMA), batch)
    assert isinstance(answers[1], BackendError)
    assert outputs(answers[2])["y"].memory.tolist() == [[4, 4]]


@pytest.mark.parametrize(("x", "reason"), [(np.ones((1, 3), np.float32), "shape"), (np.ones((1, 2)), "is FP64")])
def test_outputs_on_the_device_are_checked_like_others(x: Any, reason: str) -> None:
    (answer,), _ = run_batch(runner_for(OnDevice(), SCHEMA), [ticket(x, {"y": False}, ("y",))])
    assert isinstance(answer, BackendError)
    assert reason in answer.message


def test_a_reshape_is_undone_on_the_device() -> None:
    schema = OutputSchema("m", "1", {"y": Spec("y", dtypes.FP32, (1, 2), reshape=(2,))}, True)
    (answer,), _ = run_batch(runner_for(OnDevice(), schema), [ticket(rows(1), {"y": False})])
    assert outputs(answer)["y"].shape == (1, 1, 2)
    assert isinstance(outputs(answer)["y"], PlayedDeviceTensor)


def test_padded_and_ragged_batches_are_on_the_host() -> None:
    tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": ["2"], "allow_ragged_batch": True}
    shaping = shaping_of({"name": "m", "max_batch_size": 4, "input": [tensor], "output": []})
    runner = runner_for(OnDevice(), SCHEMA, shaping)
    assert isinstance(runner, RaggedRunner)
    assert not runner.takes_device_tensors
