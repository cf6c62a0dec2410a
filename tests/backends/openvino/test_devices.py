"""TARGET_DEVICE on a machine with only a CPU: right results, or an error with the list of devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import pytest
from openvino import opset13

from headrace_testing.serving import serve

pytestmark = pytest.mark.skipif(
    openvino.Core().available_devices != ["CPU"], reason="this machine has more than a CPU for OpenVINO"
)


def settings(**parameters: str) -> str:
    return " ".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
    )


@pytest.mark.parametrize(
    "device", ["CPU", "AUTO", "AUTO:CPU", "AUTO:-GPU", "MULTI:CPU", "MULTI:CPU(2)", "HETERO:CPU", "BATCH:CPU"]
)
@pytest.mark.parametrize(("count", "more"), [(1, {}), (3, {"NUM_STREAMS": "2", "INFERENCE_NUM_THREADS": "2"})])
def test_all_devices_that_select_the_cpu_agree(models: Any, device: str, count: int, more: dict[str, str]) -> None:
    models.add()
    group = f"instance_group {{ count: {count} kind: KIND_CPU }}"
    models.config(f"{group} {settings(TARGET_DEVICE=device, **more)}")
    a, b = np.random.default_rng(3).normal(size=(2, 3, 16)).astype(np.float32)
    with serve(models.root) as server:
        outputs = server.infer("m", {"A": a, "B": b}).outputs
    np.testing.assert_array_equal(outputs["S"], a + b)
    np.testing.assert_array_equal(outputs["D"], a - b)


@pytest.mark.parametrize("device", ["CPU", "AUTO", "AUTO:CPU", "AUTO:-GPU", "MULTI:CPU(2)", "HETERO:CPU", "BATCH:CPU"])
def test_all_devices_that_select_the_cpu_compute_in_fp32(models: Any, device: str) -> None:
    """Left alone, CPUs with AMX multiply matrices in BF16. Elsewhere this cannot fail."""
    generator = np.random.default_rng(5)
    weights, x = (generator.normal(size=size).astype(np.float32) for size in ((64, 64), (8, 64)))
    models.save(
        lambda x: {"y": opset13.matmul(x, opset13.constant(weights), False, False)},
        {"x": (openvino.Type.f32, [-1, 64])},
    )
    models.config(settings(TARGET_DEVICE=device))
    with serve(models.root) as server:
        found = np.asarray(server.infer("m", {"x": x[:4]}).outputs["y"])
    np.testing.assert_allclose(found, x[:4].astype(np.float64) @ weights, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("GPU", "there is no 'GPU' here, only CPU"),
        ("GPU.1", "there is no 'GPU.1' here, only CPU"),
        ("NPU", "there is no 'NPU' here, only CPU"),
        ("CPU.1", "there is no 'CPU.1' here, only CPU"),
        ("AUTO:GPU,CPU", "there is no 'GPU' here, only CPU"),
        ("MULTI:CPU,NPU", "there is no 'NPU' here, only CPU"),
        ("HETERO:GPU.1,CPU", "there is no 'GPU.1' here, only CPU"),
        ("AUTO:-CPU", "no supported devices"),
        ("MULTI", "it is made of devices, which must be named: MULTI:CPU"),
        ("HETERO", "it is made of devices, which must be named: HETERO:CPU"),
        ("AUTO:", "there is no '' here, only CPU"),
        ("cpu", "there is no 'cpu' here, only CPU"),
    ],
)
def test_a_device_that_is_not_there_is_named_with_those_that_are(models: Any, device: str, message: str) -> None:
    models.add()
    models.config(settings(TARGET_DEVICE=device))
    with serve(models.root, exit_on_error=False) as server:
        (entry,) = server.index()
    assert f"on device '{device}': " in entry.reason
    assert message in entry.reason
