"""Files of other formats, and types, that OpenVINO reads or is not let read."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
from onnx import TensorProto, helper, numpy_helper
from openvino import opset13

from headrace_testing.serving import serve


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


def test_the_weights_of_an_onnx_file_may_be_beside_it(models: Any) -> None:
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


#: OpenVINO recognizes ONNX by the content of a file, which may have any of these names.
@pytest.mark.parametrize("file", ["model.onnx", "model.pb", "model.tflite", "model.xml", "model.pdmodel"])
@pytest.mark.parametrize("location", ["/etc/passwd", "../../secret", "*/_ORT_MEM_ADDR_/*"])
def test_an_onnx_file_that_names_files_elsewhere_is_refused(models: Any, file: str, location: str) -> None:
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


# ---------------------------------------------------------------------------- ONNX, as OpenVINO changes it

INFO = helper.make_tensor_value_info


def write_onnx(models: Any, nodes: list[Any], inputs: list[Any], outputs: list[Any], config: str = "") -> None:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    version = models.root / "m" / "1"
    version.mkdir(parents=True)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), version / "model.onnx"
    )
    models.config(f'backend: "openvino" default_model_filename: "model.onnx" {config}')


@pytest.mark.parametrize("operator", ["Max", "Sum"])
def test_an_output_that_is_its_input_has_its_own_name(models: Any, operator: str) -> None:
    """OpenVINO gives both tensors both names, and names the input like the output."""
    io = [INFO(name, TensorProto.FLOAT, [3]) for name in ("x", "a")]
    write_onnx(models, [helper.make_node(operator, ["x"], ["a"])], io[:1], io[1:])
    x = np.array([1, 2, 3], np.float32)
    with serve(models.root) as server:
        outputs = server.infer("m", {"x": x}).outputs
    assert list(outputs) == ["a"]
    np.testing.assert_array_equal(outputs["a"], x)


@pytest.mark.parametrize("dims", ["", "-1", "24"])
def test_dims_that_only_the_compiled_model_has_are_optional_in_the_config(models: Any, dims: str) -> None:
    config = f"""
        input {{ name: "x" data_type: TYPE_FP32 dims: [2, 3, 4] }}
        input {{ name: "s" data_type: TYPE_INT64 dims: 1 }}
        output {{ name: "y" data_type: TYPE_FP32 dims: [{dims}] }}"""
    write_onnx(
        models,
        [helper.make_node("Reshape", ["x", "s"], ["y"])],
        [INFO("x", TensorProto.FLOAT, [2, 3, 4]), INFO("s", TensorProto.INT64, [1])],
        [INFO("y", TensorProto.FLOAT, ["n"])],
        config if dims else "",
    )
    x = np.arange(24, dtype=np.float32)
    with serve(models.root) as server:
        outputs = server.infer("m", {"x": x.reshape(2, 3, 4), "s": np.array([24])}).outputs
    np.testing.assert_array_equal(outputs["y"], x)


def test_an_operator_that_openvino_reads_from_memory_only_is_served(models: Any) -> None:
    """The loss of a row is its value for its class, negated."""
    write_onnx(
        models,
        [helper.make_node("NegativeLogLikelihoodLoss", ["x", "t"], ["y"], reduction="none", ignore_index=9)],
        [INFO("x", TensorProto.FLOAT, [2, 3, 1]), INFO("t", TensorProto.INT64, [2, 1])],
        [INFO("y", TensorProto.FLOAT, [2, 1])],
    )
    x = np.array([[[1], [2], [3]], [[4], [5], [6]]], np.float32)
    with pytest.raises(RuntimeError, match="NegativeLogLikelihoodLoss"):
        openvino.Core().read_model(str(models.root / "m/1/model.onnx"))
    with serve(models.root) as server:
        outputs = server.infer("m", {"x": x, "t": np.array([[2], [0]])}).outputs
    np.testing.assert_array_equal(outputs["y"], [[-3], [-4]])


SUM_OF_ALL = """
input [{ name: "x" data_type: TYPE_FP32 dims: [2, 3] }, { name: "axes" data_type: TYPE_INT64 dims: [-1] }]
output { name: "y" data_type: TYPE_FP32 dims: [1, 1] }
"""


def write_sum(models: Any, config: str) -> None:
    inputs = [INFO("x", TensorProto.FLOAT, [2, 3]), INFO("axes", TensorProto.INT64, [0])]
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"])
    write_onnx(models, [node], inputs, [INFO("y", TensorProto.FLOAT, [1, 1])], config)


@pytest.mark.parametrize("count", [1, 2])
def test_a_config_may_have_an_unused_input(models: Any, count: int, caplog: pytest.LogCaptureFixture) -> None:
    write_sum(models, f"{SUM_OF_ALL} instance_group {{ count: {count} }}")
    with caplog.at_level(logging.WARNING, "headrace.openvino"), serve(models.root) as server:
        inputs: dict[str, Any] = {"x": np.ones((2, 3), np.float32), "axes": np.zeros(0, np.int64)}
        assert np.asarray(server.infer("m", inputs).outputs["y"]).item() == 6
    warnings = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert warnings == [
        "model 'm': OpenVINO has dropped inputs, which requests may have, but which have no effect: axes"
    ]


def test_a_wrong_name_is_not_taken_for_an_input_that_openvino_drops(models: Any) -> None:
    write_sum(models, SUM_OF_ALL.replace('"x"', '"X"'))
    assert "configuration expects 2 inputs, model provides 1" in reason(models)


@pytest.mark.parametrize("kind", ["i8", "u8"])
def test_of_whole_numbers_of_64_bits_the_lower_32_count(models: Any, kind: str) -> None:
    """The README documents this. If the test fails, OpenVINO has changed."""
    element = {"i8": openvino.Type.i64, "u8": openvino.Type.u64}[kind]
    models.save(lambda x: {"y": opset13.add(x, opset13.constant(np.array(0, kind)))}, {"x": (element, [-1, 4])})
    models.config('backend: "openvino"')
    x = np.random.default_rng(1).integers(0, 2**63, (1, 4), kind)
    with serve(models.root) as server:
        y = server.infer("m", {"x": x}).outputs["y"]
    np.testing.assert_array_equal(y, x.astype(np.int32).astype(kind))


@pytest.mark.parametrize("place", ["graph", "branch"])
@pytest.mark.parametrize("dims", [[2, 3, 4, 5], ["a", "b", "c", "d"], [2, 3, 2, 3, 2]], ids=str)
def test_a_tile_returns_only_elements_of_its_input(models: Any, dims: list[Any], place: str) -> None:
    """OpenVINO's CPU does not write all results if a request sets the repeats of three axes."""
    size, rank = [5 if isinstance(dim, str) else dim for dim in dims], len(dims)
    nodes = [helper.make_node("Tile", ["x", "r"], ["y"])]
    y = INFO("y", TensorProto.FLOAT, [None] * rank)
    if place == "branch":
        branches = {
            f"{name}_branch": helper.make_graph(
                [helper.make_node("Tile", ["x", "r"], [f"{name}_y"])], name, [], [INFO(f"{name}_y", 1, [None] * rank)]
            )
            for name in ("then", "else")
        }
        nodes = [helper.make_node("If", ["c"], ["y"], **branches)]  # type: ignore[arg-type]
    inputs = [INFO("x", TensorProto.FLOAT, dims), INFO("r", TensorProto.INT64, [rank])]
    inputs += [INFO("c", TensorProto.BOOL, [1])] if place == "branch" else []
    declared = ", ".join(
        f'{{ name: "{info.name}" data_type: {kind} dims: {list(shape)} }}'
        for info, kind, shape in zip(
            inputs, ("TYPE_FP32", "TYPE_INT64", "TYPE_BOOL"), (size, [rank], [1]), strict=False
        )
    )
    write_onnx(
        models,
        nodes,
        inputs,
        [y],
        f'input [{declared}] output {{ name: "y" data_type: TYPE_FP32 dims: {[-1] * rank} }}',
    )
    x, repeats = np.random.default_rng(3).normal(size=size).astype(np.float32), np.full(rank, 2)
    arrays: dict[str, Any] = {"x": x, "r": repeats, "c": np.array([True])}
    with serve(models.root) as server:
        outputs = server.infer("m", {info.name: arrays[info.name] for info in inputs}).outputs
    np.testing.assert_array_equal(outputs["y"], np.tile(x, repeats))
