"""The published kit, with arithmetic as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from openvino import opset13

from headrace_testing import BackendConformance, Example, extreme_values

ELEMENTS = {"BOOL": "boolean", "SCALAR": "f32", "FP16": "f16", "FP32": "f32", "FP64": "f64", "BF16": "bf16"}


@pytest.fixture(autouse=True, scope="module")
def engine_threads() -> None:
    """OpenVINO's threads belong to the process, as many as cores, and begin when there is work: before the kit
    counts threads, all of them have."""
    x = opset13.parameter([64, 3, 64, 64], openvino.Type.f32)
    weights = opset13.constant(np.ones((64, 3, 3, 3), np.float32))
    made = opset13.convolution(x, weights, [1, 1], [0, 0], [0, 0], [1, 1])
    compiled = openvino.Core().compile_model(openvino.Model([made], [x], "busy"), "CPU")
    compiled([np.ones((64, 3, 64, 64), np.float32)])


class TestOpenVino(BackendConformance):
    plugin, backend, heavy = "headrace_openvino", "openvino", ("openvino",)

    @pytest.fixture
    def example(self, models: Any) -> Example:
        rng = np.random.default_rng(7)
        a, b = rng.normal(size=(2, 5, 16)).astype(np.float32)
        return Example(models.add(), {"A": a, "B": b}, {"S": a + b, "D": a - b}, damage="model.xml")

    def example_of(self, kind: str, directory: Path) -> Example | None:
        """``y = x`` by way of a Reshape, which changes no value; strings are refused."""
        if kind == "BYTES":
            return None
        x = extreme_values(kind)
        if kind in ("INT64", "UINT64"):  # OpenVINO's CPU computes in 32 bits
            x = x.clip(0 if kind == "UINT64" else -(2**31), 2**31 - 1)
        element = ELEMENTS.get(kind) or kind.lower().replace("uint", "u").replace("int", "i")
        parameter = opset13.parameter([-1, *x.shape[1:]], getattr(openvino.Type, element))
        parameter.output(0).set_names({"x"})
        made = opset13.reshape(parameter, opset13.constant(np.array([-1, *x.shape[1:]], np.int64)), False)
        made.output(0).set_names({"y"})
        openvino.save_model(openvino.Model([made], [parameter], "network"), str(directory / "model.xml"), False)
        return Example(directory, {"x": x}, {"y": x})
