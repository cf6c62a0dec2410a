"""Files of other formats, and types, that OpenVINO reads or is not let read."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import openvino
import pytest
from onnx import TensorProto, helper, numpy_helper
from openvino import opset13

from headrace.testing.serving import serve


def save_onnx(models: Any, **how: Any) -> None:
    """``y = x + 1`` for f32[rows, 2]."""
    io = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy"]
    one = numpy_helper.from_array(np.ones(2, np.float32), "one")
    graph = helper.make_graph([helper.make_node("Add", ["x", "one"], ["y"])], "g", io[:1], io[1:], [one])
    version = models.root / "m" / "1"
    version.mkdir(parents=True)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(proto, version / "model.onnx", **how)
    models.config('backend: "openvino" default_model_filename: "model.onnx"')


def test_an_onnx_file_is_read(models: Any) -> None:
    save_onnx(models)
    x = np.array([[1, 2], [3, 4]], np.float32)
    with serve(models.root) as server:
        assert server.resolve("m").config.max_batch_size == 4
        np.testing.assert_array_equal(server.infer("m", {"x": x}).outputs["y"], x + 1)


def test_an_onnx_file_that_names_others_is_refused(models: Any) -> None:
    save_onnx(models, save_as_external_data=True, location="weights", size_threshold=0)
    with serve(models.root, exit_on_error=False) as server:
        (entry,) = server.index()
    assert "keeps weights in other files" in entry.reason


@pytest.mark.parametrize("element", ["u4", "string"])
def test_a_type_that_no_request_can_carry_is_refused(models: Any, element: str) -> None:
    kind = getattr(openvino.Type, element)
    models.save(lambda x: {"y": opset13.reshape(x, opset13.shape_of(x), False)}, {"x": (kind, [-1, 2])})
    with serve(models.root, exit_on_error=False) as server:
        (entry,) = server.index()
    assert f"unsupported datatype {element} for input 'x'" in entry.reason


def test_a_scalar_has_dims_one(models: Any) -> None:
    models.save(lambda x: {"y": opset13.negative(x)}, {"x": (openvino.Type.f32, [])})
    with serve(models.root) as server:
        assert list(server.resolve("m").config.input[0].dims) == [1]
        answer = server.infer("m", {"x": np.array([2.5], np.float32)}).outputs["y"]
    np.testing.assert_array_equal(answer, np.array([-2.5], np.float32))
