"""The published kit, with arithmetic as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from headrace_testing import BackendConformance, Example, extreme_values

ELEMENTS = {"FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE", "BF16": "BFLOAT16", "BYTES": "STRING"}


class TestOnnxRuntime(BackendConformance):
    plugin, backend, heavy = "headrace_onnx", "onnxruntime", ("onnxruntime", "onnx")

    @pytest.fixture
    def example(self, graphs: Any) -> Example:
        rng = np.random.default_rng(7)
        a, b = rng.normal(size=(2, 5, 16)).astype(np.float32)
        return Example(graphs.add(), {"A": a, "B": b}, {"S": a + b, "D": a - b}, damage="model.onnx")

    def example_of(self, kind: str, directory: Path) -> Example | None:
        """``y = x`` by a Reshape, which supports every type."""
        x = extreme_values(kind)
        element = getattr(TensorProto, ELEMENTS.get(kind, "FLOAT" if kind == "SCALAR" else kind))
        shape = ["n", *x.shape[1:]]
        graph = helper.make_graph(
            [helper.make_node("Reshape", ["x", "shape"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", element, shape)],
            [helper.make_tensor_value_info("y", element, shape)],
            [helper.make_tensor("shape", TensorProto.INT64, [len(shape)], [-1, *x.shape[1:]])],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        onnx.save(proto, directory / "model.onnx")
        return Example(directory, {"x": x}, {"y": x})
