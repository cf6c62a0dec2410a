"""Tests that need an Intel GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import pytest

from headrace_testing.serving import serve

DEVICES = openvino.Core().available_devices
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not any(each.startswith("GPU") for each in DEVICES), reason="OpenVINO has no GPU here"),
]


@pytest.mark.parametrize("device", ["GPU", "AUTO:GPU,CPU", "HETERO:GPU,CPU", "MULTI:GPU,CPU"])
@pytest.mark.parametrize("count", [1, 2])
def test_answers_of_a_gpu_are_those_of_arithmetic(models: Any, device: str, count: int) -> None:
    models.add()
    models.parameter("TARGET_DEVICE", device, f"instance_group {{ count: {count} kind: KIND_CPU }}")
    a, b = np.random.default_rng(3).integers(-8, 8, size=(2, 3, 16)).astype(np.float32)  # exact in FP16, too
    with serve(models.root) as server:
        outputs = server.infer("m", {"A": a, "B": b}).outputs
    np.testing.assert_array_equal(outputs["S"], a + b)
    np.testing.assert_array_equal(outputs["D"], a - b)


def test_a_kept_answer_survives_the_next_execution(models: Any) -> None:
    models.add()
    models.parameter("TARGET_DEVICE", "GPU")
    one, two = (np.full((1, 16), value, np.float32) for value in (1, 2))
    with serve(models.root) as server:
        result = server.infer("m", {"A": one, "B": one}).outputs["S"]
        server.infer("m", {"A": two, "B": two})
    np.testing.assert_array_equal(result, two)


@pytest.mark.parametrize(("key", "value"), [("COMPILATION_NUM_THREADS", "1"), ("PERFORMANCE_HINT", "THROUGHPUT")])
def test_a_setting_for_gpus_is_taken(models: Any, key: str, value: str) -> None:
    models.add()
    parameters = {"TARGET_DEVICE": "GPU", key: value}
    models.config(
        " ".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items())
    )
    ones = np.ones((1, 16), np.float32)
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"A": ones, "B": ones}).outputs["S"], 2 * ones)
