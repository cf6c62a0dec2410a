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


def reason(models: Any) -> str:
    with serve(models.root, exit_on_error=False) as server:
        (entry,) = server.index()
    return entry.reason


def save_onnx(models: Any, name: str = "one", **how: Any) -> None:
    """``y = x + 1`` for f32[rows, 2]; ``name`` is that of the weights."""
    io = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy"]
    one = numpy_helper.from_array(np.ones(2, np.float32), name)
    graph = helper.make_graph([helper.make_node("Add", ["x", name], ["y"])], "g", io[:1], io[1:], [one])
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


def test_the_weights_of_an_onnx_file_may_lie_beside_it(models: Any) -> None:
    save_onnx(models, save_as_external_data=True, location="weights", size_threshold=0)
    assert (models.root / "m" / "1" / "weights").is_file()
    x = np.array([[1, 2], [3, 4]], np.float32)
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": x}).outputs["y"], x + 1)


def test_an_onnx_file_whose_weights_are_called_location_names_no_file(models: Any) -> None:
    save_onnx(models, name="location")
    with serve(models.root) as server:
        answer = server.infer("m", {"x": np.zeros((1, 2), np.float32)}).outputs["y"]
    np.testing.assert_array_equal(answer, [[1, 1]])


#: OpenVINO knows ONNX by what a file holds, so that it may have any of these names.
@pytest.mark.parametrize("file", ["model.onnx", "model.pb", "model.tflite", "model.xml", "model.pdmodel"])
@pytest.mark.parametrize("location", ["/etc/passwd", "../../secret", "*/_ORT_MEM_ADDR_/*"])
def test_an_onnx_file_that_names_others_elsewhere_is_refused_whatever_it_is_called(
    models: Any, file: str, location: str
) -> None:
    save_onnx(models, save_as_external_data=True, location="weights", size_threshold=0)
    version = models.root / "m" / "1"
    proto = onnx.load(version / "model.onnx", load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        entry.value = location if entry.key == "location" else entry.value
    (version / "model.onnx").rename(version / file)
    (version / file).write_bytes(proto.SerializeToString())
    (version / "model.bin").touch()
    models.config(f'backend: "openvino" default_model_filename: "{file}"')
    assert f"m/1/{file}' names the file '{location}', which must stay in the model directory" in reason(models)


def test_an_onnx_file_above_its_version_names_files_from_there(models: Any) -> None:
    save_onnx(models, save_as_external_data=True, location="weights", size_threshold=0)
    model = models.root / "m"
    proto = onnx.load(model / "1" / "model.onnx", load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = "../weights"
    (model / "model.onnx").write_bytes(proto.SerializeToString())
    models.config('backend: "openvino" default_model_filename: "../model.onnx"')
    assert "names the file '../weights', which must stay in the model directory: it climbs out" in reason(models)


def test_a_folder_that_is_no_saved_model_is_refused(models: Any) -> None:
    save_onnx(models)
    folder = models.root / "m" / "1" / "model.saved_model"
    folder.mkdir()
    (folder.parent / "model.onnx").rename(folder / "model.onnx")
    models.config('backend: "openvino" default_model_filename: "model.saved_model"')
    assert "m/1/model.saved_model' is a folder, but not a SavedModel, which has saved_model.pb in it" in reason(models)


def test_a_kind_of_file_that_is_not_served_is_refused_with_those_that_are(models: Any) -> None:
    save_onnx(models)
    (models.root / "m" / "1" / "model.onnx").rename(models.root / "m" / "1" / "model.bytes")
    models.config('backend: "openvino" default_model_filename: "model.bytes"')
    assert "ends in .xml, .onnx, .pb, .pdmodel, .tflite, or it is the folder of a SavedModel" in reason(models)


@pytest.mark.parametrize("element", ["u4", "string"])
def test_a_type_that_no_request_can_carry_is_refused(models: Any, element: str) -> None:
    kind = getattr(openvino.Type, element)
    models.save(lambda x: {"y": opset13.reshape(x, opset13.shape_of(x), False)}, {"x": (kind, [-1, 2])})
    assert f"unsupported datatype {element} for input 'x'" in reason(models)


def test_a_scalar_has_dims_one(models: Any) -> None:
    models.save(lambda x: {"y": opset13.negative(x)}, {"x": (openvino.Type.f32, [])})
    with serve(models.root) as server:
        assert list(server.resolve("m").config.input[0].dims) == [1]
        answer = server.infer("m", {"x": np.array([2.5], np.float32)}).outputs["y"]
    np.testing.assert_array_equal(answer, np.array([-2.5], np.float32))
