"""Shapes: dynamic ones, those that the config gives the graph, and batches that are filled up, against the engine."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import openvino
import pytest
from openvino import opset13

from headrace import InvalidArgument
from headrace_testing.serving import serve

RNG = np.random.default_rng(11)


def of_engine(models: Any, *inputs: np.ndarray[Any, Any], shapes: Any = None) -> np.ndarray[Any, Any]:
    """Return the first output of the engine, called directly, after setting ``shapes`` in the graph."""
    core = openvino.Core()
    network = core.read_model(str(models.root / "m" / "1" / "model.xml"))
    if shapes is not None:
        network.reshape(shapes)
    compiled = core.compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    answer: np.ndarray[Any, Any] = compiled(list(inputs))[0].copy()
    return answer


def convolution(models: Any, shape: list[int]) -> None:
    """``y`` = 4 channels of ``x`` f32[rows, 3, height, width]."""
    weights = RNG.normal(size=(4, 3, 3, 3)).astype(np.float32)
    models.save(
        lambda x: {"y": opset13.convolution(x, opset13.constant(weights), [1, 1], [1, 1], [1, 1], [1, 1])},
        {"x": (openvino.Type.f32, shape)},
    )


@pytest.mark.parametrize("shape", [[-1, 3, -1, -1], [-1, -1, -1, -1]])
def test_a_graph_with_variable_dims_serves_every_size(models: Any, shape: list[int]) -> None:
    convolution(models, shape)
    with serve(models.root) as server:
        for rows, height, width in ((1, 8, 8), (3, 5, 9), (2, 16, 1), (1, 8, 8)):
            x = RNG.normal(size=(rows, 3, height, width)).astype(np.float32)
            y = server.infer("m", {"x": x}).outputs["y"]
            np.testing.assert_allclose(y, of_engine(models, x), rtol=1e-4, atol=1e-5)


def test_a_bounded_dimension_is_variable_and_its_bound_is_the_engine_s(models: Any) -> None:
    x = opset13.parameter(openvino.PartialShape([-1, openvino.Dimension(1, 8)]), openvino.Type.f32)
    x.output(0).set_names({"x"})
    y = opset13.negative(x)
    y.output(0).set_names({"y"})
    version = models.root / "m" / "1"
    version.mkdir(parents=True)
    openvino.save_model(openvino.Model([y], [x], "network"), str(version / "model.xml"), False)
    with serve(models.root) as server:
        assert list(server.resolve("m").config.input[0].dims) == [-1]
        array = np.ones((2, 8), np.float32)
        np.testing.assert_array_equal(server.infer("m", {"x": array}).outputs["y"], -array)
        with pytest.raises(Exception, match=r"(?i)shape|dim"):
            server.infer("m", {"x": np.ones((2, 9), np.float32)})
        np.testing.assert_array_equal(server.infer("m", {"x": array}).outputs["y"], -array)


def test_inputs_get_the_dims_of_the_config(models: Any) -> None:
    convolution(models, [-1, 3, 8, 8])
    models.parameter(
        "RESHAPE_IO_LAYERS",
        "YES",
        """max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [3, 12, 6] }
        output { name: "y" data_type: TYPE_FP32 dims: [4, 12, 6] }""",
    )
    x = RNG.normal(size=(2, 3, 12, 6)).astype(np.float32)
    with serve(models.root) as server:
        y = server.infer("m", {"x": x}).outputs["y"]
    expected = of_engine(models, x, shapes=openvino.PartialShape([-1, 3, 12, 6]))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_without_the_parameter_such_dims_are_refused(models: Any) -> None:
    convolution(models, [-1, 3, 8, 8])
    models.config(
        """max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [3, 12, 6] }
        output { name: "y" data_type: TYPE_FP32 dims: [4, 12, 6] }"""
    )
    with serve(models.root, exit_on_error=False) as server:
        (entry,) = server.index()
    assert "'x'" in entry.reason


def test_dims_that_the_graph_cannot_have_are_refused(models: Any) -> None:
    convolution(models, [-1, 3, 8, 8])
    models.parameter(
        "RESHAPE_IO_LAYERS",
        "YES",
        """max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [5, 8, 8] }
        output { name: "y" data_type: TYPE_FP32 dims: [4, 8, 8] }""",
    )
    with serve(models.root, exit_on_error=False) as server:
        (entry,) = server.index()
    assert "unable to load model 'm': RESHAPE_IO_LAYERS: " in entry.reason


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_padded_batch_has_the_answers_of_its_rows(models: Any, rows: int) -> None:
    models.add(rows=4)
    models.parameter("ENABLE_BATCH_PADDING", "YES", "max_batch_size: 4")
    a, b = RNG.normal(size=(2, rows, 16)).astype(np.float32)
    whole = [np.concatenate([each, np.zeros((4 - rows, 16), np.float32)]) for each in (a, b)]
    with serve(models.root) as server:
        y = server.infer("m", {"A": a, "B": b}).outputs["S"]
    np.testing.assert_array_equal(y, of_engine(models, *whole)[:rows])


def test_without_padding_only_whole_batches_are_taken(models: Any) -> None:
    models.add(rows=4)
    models.config("max_batch_size: 4")
    ones = np.ones((3, 16), np.float32)
    with serve(models.root) as server, pytest.raises(InvalidArgument, match="expected requests with batch size '4'"):
        server.infer("m", {"A": ones, "B": ones})


FIXED = """max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [3, 8, 8] }
    output { name: "y" data_type: TYPE_FP32 dims: [4, 8, 8] }"""


@pytest.mark.parametrize("config", ["max_batch_size: 8", FIXED])
@pytest.mark.parametrize("axis", [1, 5])
def test_a_batch_axis_that_the_file_has_fixed_is_made_variable(models: Any, axis: int, config: str) -> None:
    convolution(models, [axis, 3, 8, 8])
    models.config(config)
    with serve(models.root) as server:
        for rows in (1, 3, 8):
            x = RNG.normal(size=(rows, 3, 8, 8)).astype(np.float32)
            y = server.infer("m", {"x": x}).outputs["y"]
            expected = of_engine(models, x, shapes=openvino.PartialShape([-1, 3, 8, 8]))
            np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def refusal(models: Any) -> str:
    with serve(models.root, exit_on_error=False) as server:
        (entry,) = server.index()
    return entry.reason


def test_a_batch_size_fixed_by_the_config_stays_fixed_and_is_refused(models: Any) -> None:
    convolution(models, [1, 3, 8, 8])
    models.parameter("SKIP_OV_DYNAMIC_BATCHSIZE", "YES", FIXED)
    assert "'m', tensor 'x'" in refusal(models)


@pytest.mark.parametrize("shape", [[1, 6], [2, 3]])
def test_a_graph_whose_middle_is_made_for_one_batch_is_refused(models: Any, shape: list[int]) -> None:
    """By the engine, or because its output stays as it is."""
    models.save(
        lambda x: {"y": opset13.reshape(x, opset13.constant(np.array(shape, np.int64)), False)},
        {"x": (openvino.Type.f32, [1, 6])},
    )
    models.config(f"""max_batch_size: 8 input {{ name: "x" data_type: TYPE_FP32 dims: [6] }}
        output {{ name: "y" data_type: TYPE_FP32 dims: [{shape[1]}] }}""")
    assert "unable to load model 'm'" in (message := refusal(models)) or "'m', tensor 'y'" in message


def test_inputs_whose_first_axes_differ_have_no_batch_in_common(models: Any) -> None:
    io = {name: (openvino.Type.f32, [rows, 16]) for name, rows in (("A", 1), ("B", 4))}
    models.save(lambda a, b: {"S": opset13.add(a, b)}, io)
    tensors = " ".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [16] }}'
        for kind, name in (("input", "A"), ("input", "B"), ("output", "S"))
    )
    models.config(f"max_batch_size: 8 {tensors}")
    assert "'m', tensor 'A'" in refusal(models)


def test_a_graph_without_batches_keeps_its_shape(models: Any) -> None:
    convolution(models, [1, 3, 8, 8])
    with serve(models.root) as server:
        assert list(server.resolve("m").config.input[0].dims) == [1, 3, 8, 8]


@pytest.mark.parametrize("element", ["i64", "u64", "f64"])
def test_tensors_with_reduced_precision_are_logged(models: Any, element: str, caplog: pytest.LogCaptureFixture) -> None:
    models.save(lambda x: {"y": opset13.add(x, x)}, {"x": (getattr(openvino.Type, element), [-1, 2])})
    with caplog.at_level(logging.WARNING, "headrace.openvino"), serve(models.root):
        pass
    (message,) = [record.getMessage() for record in caplog.records if record.name == "headrace.openvino"]
    kind = {"i64": "INT64", "u64": "UINT64", "f64": "FP64"}[element]
    assert message.endswith(f": x ({kind}), y ({kind})")


def test_tensors_with_full_precision_are_not_logged(models: Any, caplog: pytest.LogCaptureFixture) -> None:
    models.add()
    with caplog.at_level(logging.WARNING, "headrace.openvino"), serve(models.root):
        pass
    assert [record for record in caplog.records if record.name == "headrace.openvino"] == []
