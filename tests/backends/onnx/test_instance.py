from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from headrace import BackendError, BytesTensor, Code, InvalidArgument, LoadError
from headrace_onnx import OnnxRuntime, Parameters
from headrace_onnx.instance import OnnxInstance


def test_answers_are_those_of_arithmetic_and_of_the_engine_called_directly(graphs: Any, pair: Any) -> None:
    path, (a, b) = graphs.add(), pair
    outputs = graphs.serve(path).execute({"A": a, "B": b})
    np.testing.assert_array_equal(outputs["S"], a + b)
    np.testing.assert_array_equal(outputs["D"], a - b)
    direct = onnxruntime.InferenceSession(str(path / "model.onnx")).run(["S"], {"A": a, "B": b})[0]
    np.testing.assert_array_equal(outputs["S"], direct)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float64"]
)
def test_every_fixed_size_type_passes_unchanged(graphs: Any, dtype: str) -> None:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = np.array([[0, 1], [1, 0], [1, 1]]).astype(dtype)
    y = graphs.serve(graphs.identity(element, ["n", 2])).execute({"x": x})["y"]
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


def bfloat16_doubler(graphs: Any) -> Any:
    """``y = 2x`` in BF16, by way of FP32."""
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["f", "f"], ["g"]),
        helper.make_node("Cast", ["g"], ["y"], to=TensorProto.BFLOAT16),
    ]
    io = (TensorProto.BFLOAT16, ["n", 3])
    return graphs.serve(graphs.write(nodes, {"x": io}, {"y": io}))


def test_bfloat16_inputs_and_outputs(graphs: Any) -> None:
    x = np.array([[1.5, -2.25, 1e30], [0, 3, 7]], dtype=ml_dtypes.bfloat16)
    y = bfloat16_doubler(graphs).execute({"x": x})["y"]
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y.astype(np.float32), 2 * x.astype(np.float32))


def test_string_outputs_beside_bfloat16(graphs: Any) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=1),
        helper.make_node("Cast", ["f"], ["y"], to=TensorProto.STRING),
    ]
    path = graphs.write(nodes, {"x": (TensorProto.BFLOAT16, ["n", 2])}, {"y": (TensorProto.STRING, ["n", 2])})
    y = graphs.serve(path).execute({"x": np.array([[1.5, -2]], ml_dtypes.bfloat16)})["y"]
    assert y.tolist() == [["1.5", "-2"]]


def test_string_inputs_beside_bfloat16_are_refused_at_load(graphs: Any) -> None:
    ios = {"s": (TensorProto.STRING, ["n"]), "b": (TensorProto.BFLOAT16, ["n"])}
    nodes = [helper.make_node("Identity", ["s"], ["t"]), helper.make_node("Reshape", ["b", "whole"], ["c"])]
    whole = helper.make_tensor("whole", TensorProto.INT64, [1], [-1])
    path = graphs.write(nodes, ios, {"t": ios["s"], "c": ios["b"]}, [whole])
    with pytest.raises(LoadError, match="input 's' is BYTES and another tensor is BF16"):
        graphs.serve(path)


def test_bfloat16_answers_own_their_memory(graphs: Any) -> None:
    instance = bfloat16_doubler(graphs)
    ones = np.ones((1, 3), dtype=ml_dtypes.bfloat16)
    first = instance.execute({"x": ones})["y"]
    instance.execute({"x": ones * ml_dtypes.bfloat16(8)})
    np.testing.assert_array_equal(first.astype(np.float32), [[2, 2, 2]])


def test_bfloat16_takes_zero_rows_and_strided_rows(graphs: Any) -> None:
    instance = bfloat16_doubler(graphs)
    assert instance.execute({"x": np.empty((0, 3), dtype=ml_dtypes.bfloat16)})["y"].shape == (0, 3)
    strided = np.arange(12).reshape(2, 6).astype(ml_dtypes.bfloat16)[:, ::2]
    np.testing.assert_array_equal(instance.execute({"x": strided})["y"].astype(np.float32), [[0, 4, 8], [12, 16, 20]])


def test_strings_keep_every_character(graphs: Any) -> None:
    texts = np.array([["", "naïve"], ["a\0b", "日本語 🚰"]], dtype=object)
    x = BytesTensor.from_objects(texts)
    y = BytesTensor.from_objects(graphs.serve(graphs.identity(TensorProto.STRING, ["n", 2])).execute({"x": x})["y"])
    assert y.shape == (2, 2)
    assert y.items() == [text.encode() for text in texts.ravel()]


def test_zero_strings_pass(graphs: Any) -> None:
    x = BytesTensor.from_items([], (0, 2))
    assert graphs.serve(graphs.identity(TensorProto.STRING, ["n", 2])).execute({"x": x})["y"].shape == (0, 2)


def test_bytes_that_are_no_text_are_the_callers_mistake(graphs: Any) -> None:
    x = BytesTensor.from_items([b"fine", b"\xff\xfe"], (1, 2))
    with pytest.raises(InvalidArgument) as caught:
        graphs.serve(graphs.identity(TensorProto.STRING, ["n", 2])).execute({"x": x})
    assert caught.value.message == "input 'x': string element 1 is not UTF-8, but ONNX strings are text"


def test_a_scalar_is_one_element_for_the_client(graphs: Any) -> None:
    y = graphs.serve(graphs.identity(TensorProto.FLOAT, [])).execute({"x": np.array([2.5], np.float32)})["y"]
    assert y.shape == (1,)
    assert y[0] == 2.5


def test_the_engine_gets_a_scalar_as_a_scalar(graphs: Any) -> None:
    path = graphs.write(
        [helper.make_node("Unsqueeze", ["x", "axes"], ["y"])],
        {"x": (TensorProto.FLOAT, [])},
        {"y": (TensorProto.FLOAT, [1])},
        [helper.make_tensor("axes", TensorProto.INT64, [1], [0])],
    )
    assert graphs.serve(path).execute({"x": np.array([2.5], np.float32)})["y"].shape == (1,)


def test_a_scalar_string_is_one_element_for_the_client(graphs: Any) -> None:
    x = BytesTensor.from_items([b"hi"], (1,))
    y = graphs.serve(graphs.identity(TensorProto.STRING, [])).execute({"x": x})["y"]
    assert y.shape == (1,)
    assert y[0] == "hi"


def test_zero_rows_give_zero_rows(graphs: Any) -> None:
    empty = np.empty((0, 16), np.float32)
    assert graphs.serve(graphs.add()).execute({"A": empty, "B": empty})["S"].shape == (0, 16)


def test_inputs_need_be_neither_aligned_nor_writable_nor_contiguous(graphs: Any, pair: Any) -> None:
    a, b = pair
    raw = b"x" + a.tobytes()
    unaligned = np.frombuffer(raw, np.float32, offset=1).reshape(a.shape)
    assert not unaligned.flags.aligned
    assert not unaligned.flags.writeable
    strided = np.repeat(b, 2, axis=1)[:, ::2]
    outputs = graphs.serve(graphs.add()).execute({"A": unaligned, "B": strided})
    np.testing.assert_array_equal(outputs["S"], a + b)


def test_only_the_configured_outputs_are_computed(graphs: Any, pair: Any) -> None:
    config = """
        max_batch_size: 4
        input [{ name: "A" data_type: TYPE_FP32 dims: 16 }, { name: "B" data_type: TYPE_FP32 dims: 16 }]
        output [{ name: "D" data_type: TYPE_FP32 dims: 16 }]
    """
    assert list(graphs.serve(graphs.add(), config).execute({"A": pair[0], "B": pair[1]})) == ["D"]


def test_an_omitted_optional_input_takes_the_graphs_default(graphs: Any) -> None:
    path = graphs.write(
        [helper.make_node("Add", ["x", "W"], ["y"])],
        {"x": (TensorProto.FLOAT, [3, 2]), "W": (TensorProto.FLOAT, [2])},
        {"y": (TensorProto.FLOAT, [3, 2])},
        [helper.make_tensor("W", TensorProto.FLOAT, [2], [5, 6])],
    )
    instance = graphs.serve(
        path,
        'input { name: "x" data_type: TYPE_FP32 dims: [3, 2] } '
        'input { name: "W" data_type: TYPE_FP32 dims: 2 optional: true } '
        'output { name: "y" data_type: TYPE_FP32 dims: [3, 2] }',
    )
    zeros = np.zeros((3, 2), np.float32)
    np.testing.assert_array_equal(instance.execute({"x": zeros})["y"], np.tile([5, 6], (3, 1)))
    np.testing.assert_array_equal(instance.execute({"x": zeros, "W": np.ones(2, np.float32)})["y"], np.ones((3, 2)))


def test_the_error_of_a_failed_run_has_no_build_paths(graphs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    io = (TensorProto.FLOAT, ["n", "m"])
    instance = graphs.serve(graphs.write([helper.make_node("Add", ["A", "B"], ["S"])], {"A": io, "B": io}, {"S": io}))
    two, three = np.zeros((1, 2), np.float32), np.zeros((1, 3), np.float32)
    capfd.readouterr()
    with pytest.raises(BackendError, match=r"^onnx runtime error \d+: Non-zero status code.*2 by 3$") as caught:
        instance.execute({"A": two, "B": three})
    assert caught.value.code is Code.INTERNAL
    assert "/" not in caught.value.message
    assert "onnxruntime" not in capfd.readouterr().err, "a caller must not be able to fill the server's log"
    np.testing.assert_array_equal(instance.execute({"A": two, "B": two + 1})["S"], [[1, 1]])


def test_threads_run_a_session_at_once(
    graphs: Any, at_once: Callable[[Sequence[Callable[[], Any]]], list[Any]]
) -> None:
    backend, path = OnnxRuntime({}), graphs.add()
    model = graphs.model(path)
    backend.complete_config(model)
    pool = backend.share(model)
    shared = graphs.model(path, str(model.config), shared=pool)
    instances: list[Any] = [backend.load(shared) for _ in range(4)]

    def work(number: int) -> Callable[[], bool]:
        a = np.full((2, 16), number, np.float32)
        return lambda: all(np.all(instances[number].execute({"A": a, "B": a})["S"] == 2 * a) for _ in range(200))

    assert at_once([work(number) for number in range(4)]) == [True] * 4
    assert len({id(instance._session) for instance in instances}) == 1


def test_the_config_can_turn_off_shared_sessions(graphs: Any) -> None:
    backend, path = OnnxRuntime({}), graphs.add()
    model = graphs.model(path)
    backend.complete_config(model)
    own = graphs.model(
        path, str(model.config), Parameters(share_session_between_instances=False), shared=backend.share(model)
    )
    first, second = (typing.cast("OnnxInstance", backend.load(own)) for _ in range(2))
    assert first._session is not second._session


def repeating(graphs: Any) -> Any:
    """``y = x + count``, by adding 1 as often."""
    body = helper.make_graph(
        [helper.make_node("Add", ["y_in", "one"], ["y_out"]), helper.make_node("Identity", ["go_on"], ["goes_on"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y_in", TensorProto.FLOAT, ["n"]),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y_out", TensorProto.FLOAT, ["n"]),
        ],
    )
    nodes = [
        helper.make_node("Constant", [], ["one"], value=helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])),
        helper.make_node("Loop", ["count", "", "x"], ["y"], body=body),
    ]
    io = {"count": (TensorProto.INT64, []), "x": (TensorProto.FLOAT, ["n"])}
    return graphs.write(nodes, io, {"y": (TensorProto.FLOAT, ["n"])})


def test_a_model_that_may_never_end_does_not_run_on_the_event_loop(graphs: Any) -> None:
    instance = graphs.serve(repeating(graphs))
    assert not instance.any_thread
    found = instance.execute({"count": np.array([3], np.int64), "x": np.zeros(2, np.float32)})["y"]
    np.testing.assert_array_equal(found, [3, 3])


def test_other_graphs_are(graphs: Any) -> None:
    assert graphs.serve(graphs.add()).any_thread
