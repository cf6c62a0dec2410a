"""Which requests have a plan: those without parameters whose tensors all lie in locations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.messages import dtypes
from headrace.messages.request import InferRequest, LocatedRequest
from headrace.messages.spec import Spec
from headrace_locations.located_plans import LocatedPlan
from headrace_locations.tensor_locations import LocatedTensors, TensorLocation, TensorLocations


class Cellar(TensorLocation):
    name = "cellar"
    memory = bytearray(np.arange(4, dtype=np.float32).tobytes())

    def source(self, parameters: Any, tensor: Spec) -> memoryview:
        return memoryview(self.memory)

    target = source


SPEC = Spec("x", dtypes.FP32, (4,))
VIEW: Any = SimpleNamespace(takes_device_tensors=None, outputs={"y": Spec("y", dtypes.FP32, (4,))})


@pytest.fixture
def location() -> Cellar:
    extension: Any = SimpleNamespace(engine=None)
    return Cellar(extension)


def read(location: Cellar, **more: Any) -> tuple[InferRequest, LocatedTensors, TensorLocations]:
    locations, located = TensorLocations([location]), LocatedTensors()
    inputs = {"x": locations.read(location, {"cellar": "a"}, SPEC, located)}
    locations.target(location, {"cellar": "b"}, VIEW.outputs["y"], located)
    return InferRequest("m", inputs | more.pop("inputs", {}), ["y"], **more), located, locations


def test_a_plan_makes_the_same_request_with_another_id(location: Cellar) -> None:
    request, located, locations = read(location, id="first")
    plan = LocatedPlan.of(request, located, True)
    assert plan is not None
    assert plan.flag
    found = plan.request(locations, VIEW, "m", "3", "second")
    assert found is not None
    again, tensors = found
    assert isinstance(again, LocatedRequest)
    assert (again.model_name, again.model_version, again.id, again.outputs) == ("m", "3", "second", ("y",))
    assert np.shares_memory(again.inputs["x"], np.frombuffer(location.memory, np.float32))
    assert list(again.targets) == list(tensors.targets) == ["y"]
    assert again.release == tensors.release


def test_a_model_without_the_output_has_no_use_for_a_plan(location: Cellar) -> None:
    request, located, locations = read(location)
    plan = LocatedPlan.of(request, located, False)
    assert plan is not None
    no_outputs: Any = SimpleNamespace(takes_device_tensors=None, outputs={})
    assert plan.request(locations, no_outputs, "m", "", "") is None


@pytest.mark.parametrize(
    "more",
    [
        {"parameters": {"a": 1}},
        {"sequence_id": 5},
        {"sequence_start": True},
        {"priority": 1},
        {"timeout_us": 1},
        {"inputs": {"other": np.zeros(3, np.float32)}},
    ],
)
def test_other_requests_have_no_plan(location: Cellar, more: dict[str, Any]) -> None:
    request, located, _ = read(location, **more)
    assert LocatedPlan.of(request, located, False) is None
