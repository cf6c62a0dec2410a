"""The config fields that a graph completes (docs/spec/behaviours.md sections 10.1 and 10.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from headrace import Code, ConfigError, HeadraceError, LoadError
from headrace.config.model_config_pb2 import ModelConfig
from headrace_onnx import OnnxRuntime
from headrace_testing.serving import serve


def completed(graphs: Any, path: Any, config: str = "", **options: str) -> ModelConfig:
    model = graphs.model(path, config)
    OnnxRuntime({key.replace("_", "-"): value for key, value in options.items()}).complete_config(model)
    result: ModelConfig = model.config
    return result


def test_an_empty_config_is_completed_from_the_graph(graphs: Any) -> None:
    config = completed(graphs, graphs.add())
    assert [(io.name, io.data_type, list(io.dims)) for io in config.input] == [("A", 11, [16]), ("B", 11, [16])]
    assert [(io.name, io.data_type, list(io.dims)) for io in config.output] == [("S", 11, [16]), ("D", 11, [16])]
    assert config.max_batch_size == 4
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        ("BOOL", 1), ("UINT8", 2), ("UINT16", 3), ("UINT32", 4), ("UINT64", 5), ("INT8", 6), ("INT16", 7),
        ("INT32", 8), ("INT64", 9), ("FLOAT16", 10), ("FLOAT", 11), ("DOUBLE", 12), ("STRING", 13), ("BFLOAT16", 14),
    ],
)  # fmt: skip
def test_every_data_type_of_the_protocol_is_recognised(graphs: Any, element: str, expected: int) -> None:
    io = (getattr(TensorProto, element), ["n", 2])
    operator = "Reshape" if element == "BFLOAT16" else "Identity"
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [-1, 2])
    arguments = ["x", "shape"] if operator == "Reshape" else ["x"]
    node = helper.make_node(operator, arguments, ["y"])
    path = graphs.write([node], {"x": io}, {"y": io}, [shape] if operator == "Reshape" else [])
    config = completed(graphs, path)
    assert (config.input[0].data_type, config.output[0].data_type) == (expected, expected)


def test_a_fixed_first_dimension_means_no_batching(graphs: Any) -> None:
    config = completed(graphs, graphs.add(rows=3))
    assert config.max_batch_size == 0
    assert list(config.input[0].dims) == [3, 16]
    assert config.WhichOneof("scheduling_choice") is None


def test_a_batch_size_in_the_config_is_kept(graphs: Any) -> None:
    config = completed(graphs, graphs.add(), "max_batch_size: 32")
    assert config.max_batch_size == 32
    assert config.HasField("dynamic_batching")


def test_the_default_batch_size_is_a_backend_option(graphs: Any) -> None:
    assert completed(graphs, graphs.add(), default_max_batch_size="16").max_batch_size == 16


def test_a_batch_size_of_one_needs_no_dynamic_batching(graphs: Any) -> None:
    assert completed(graphs, graphs.add(), "max_batch_size: 1").WhichOneof("scheduling_choice") is None


def test_a_scheduler_in_the_config_is_kept(graphs: Any) -> None:
    config = completed(graphs, graphs.add(), "sequence_batching { max_sequence_idle_microseconds: 5 }")
    assert config.WhichOneof("scheduling_choice") == "sequence_batching"


def test_a_config_with_inputs_and_outputs_is_unchanged(graphs: Any) -> None:
    text = """
        input [{ name: "A" data_type: TYPE_FP32 dims: [-1, 16] }, { name: "B" data_type: TYPE_FP32 dims: [-1, 16] }]
        output [{ name: "S" data_type: TYPE_FP32 dims: [-1, 16] }]
    """
    config = completed(graphs, graphs.add(), text)
    assert config.max_batch_size == 0
    assert [io.name for io in config.output] == ["S"]


def test_inputs_declared_with_the_batch_axis_turn_batching_off(graphs: Any) -> None:
    io = "data_type: TYPE_FP32 dims: [-1, 16]"
    text = f'input [{{ name: "A" {io} }}, {{ name: "B" {io} }}]'
    config = completed(graphs, graphs.add(), text)
    assert config.max_batch_size == 0
    assert list(config.output[0].dims) == [-1, 16]


def test_only_the_missing_side_is_completed(graphs: Any) -> None:
    text = 'input [{ name: "A" data_type: TYPE_FP32 dims: [16] }, { name: "B" data_type: TYPE_FP32 dims: [16] }]'
    config = completed(graphs, graphs.add(), text)
    assert len(config.input) == 2
    assert [io.name for io in config.output] == ["S", "D"]
    assert config.max_batch_size == 4


def test_a_batch_size_for_a_model_that_does_not_batch_is_refused(graphs: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        completed(graphs, graphs.add(rows=3), "max_batch_size: 8")
    assert caught.value.message == (
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified"
    )


def test_one_value_per_row_is_completed_as_a_reshaped_scalar(graphs: Any) -> None:
    config = completed(graphs, graphs.identity(TensorProto.FLOAT, ["n"]))
    assert list(config.input[0].dims) == [1]
    assert config.input[0].HasField("reshape")
    assert list(config.input[0].reshape.shape) == []


def test_a_scalar_of_a_model_without_batching_has_dims_one(graphs: Any) -> None:
    config = completed(graphs, graphs.identity(TensorProto.FLOAT, []))
    assert list(config.input[0].dims) == [1]
    assert not config.input[0].HasField("reshape")


def test_unknown_dimensions_become_minus_one(graphs: Any) -> None:
    config = completed(graphs, graphs.identity(TensorProto.INT64, ["n", None, "width", 3]))
    assert list(config.input[0].dims) == [-1, -1, 3]


def test_a_dim_of_zero_is_served_as_a_variable_one(graphs: Any) -> None:
    """A dim of a config cannot be 0."""
    version = graphs.identity(TensorProto.FLOAT, [2, 0])
    assert list(completed(graphs, version).input[0].dims) == [2, -1]
    with serve(graphs.root) as server:
        assert server.infer("m", {"x": np.zeros((2, 0), np.float32)}).outputs["y"].shape == (2, 0)
        with pytest.raises(HeadraceError, match="Got invalid dimensions for input: x"):
            server.infer("m", {"x": np.zeros((2, 1), np.float32)})


def test_a_type_outside_the_protocol_is_named(graphs: Any) -> None:
    with pytest.raises(LoadError) as caught:
        completed(graphs, graphs.identity(TensorProto.FLOAT8E4M3FN, ["n", 2]))
    assert caught.value.message == "unsupported datatype tensor(float8e4m3fn) for input 'x' for model 'm'"


def classifier() -> onnx.ModelProto:
    """Return the graph that skl2onnx writes by default for a linear classifier: the last operator makes a list of
    dictionaries of the probabilities."""
    ml = "ai.onnx.ml"
    scores: dict[str, Any] = {
        "coefficients": [1.0, -1.0, -1.0, 1.0],
        "intercepts": [0.0, 0.0],
        "classlabels_ints": [0, 1],
    }
    nodes = [
        helper.make_node("LinearClassifier", ["X"], ["label", "p"], domain=ml, post_transform="SOFTMAX", **scores),
        helper.make_node("Cast", ["label"], ["output_label"], to=TensorProto.INT64),
        helper.make_node("ZipMap", ["p"], ["output_probability"], domain=ml, classlabels_int64s=[0, 1]),
    ]
    kinds = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, 2])],
        [
            helper.make_tensor_value_info("output_label", TensorProto.INT64, [None]),
            helper.make_value_info("output_probability", helper.make_sequence_type_proto(kinds)),
        ],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(ml, 3)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.parametrize("output", ["", 'output { name: "output_label" data_type: TYPE_INT64 dims: 1 reshape { } }'])
@pytest.mark.parametrize("rows", ["", "max_batch_size: 8"])
def test_outputs_that_are_no_tensors_are_skipped(
    graphs: Any, output: str, rows: str, caplog: pytest.LogCaptureFixture
) -> None:
    version = graphs.root / "m/1"
    version.mkdir(parents=True)
    onnx.save(classifier(), version / "model.onnx")
    (version.parent / "config.pbtxt").write_text(f'backend: "onnxruntime"\n{rows}\n{output}')
    x = np.array([[1, 2], [2, 1], [3, 4]], np.float32)
    with serve(graphs.root) as server:
        outputs = server.infer("m", {"X": x}).outputs
    assert outputs.keys() == {"output_label"}
    assert np.asarray(outputs["output_label"]).tolist() == [[1], [0], [1]]
    found = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    expected = (
        "model 'm': outputs that are not tensors are left out: 'output_probability' is seq(map(int64,tensor(float)))"
    )
    assert found == ([] if output else [expected])


def test_outputs_of_which_none_is_a_tensor_are_refused(graphs: Any, tmp_path: Any) -> None:
    path = graphs.identity(TensorProto.FLOAT, ["n", 2])
    graph = helper.make_graph(
        [helper.make_node("SequenceConstruct", ["x"], ["s"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(LoadError, match=r"output 's' is seq\(tensor\(float\)\), not a tensor") as caught:
        completed(graphs, path)
    assert caught.value.code is Code.UNSUPPORTED


def test_a_backend_option_that_is_no_number_is_refused(graphs: Any) -> None:
    with pytest.raises(ConfigError, match="default-max-batch-size of 'onnxruntime' must be a whole number, got 'four'"):
        completed(graphs, graphs.add(), default_max_batch_size="four")
