"""Files that are truncated, declare wrong sizes, or would take too much time or memory are refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
from onnx import TensorProto, helper, numpy_helper
from openvino import opset13

from headrace.errors import Unavailable
from headrace_testing.serving import serve

IO: list[str | int | None] = ["n", 4]


def reason(models: Any) -> str:
    """Why ``m`` is not served, beside ``good``, which is."""
    models.add("good")
    ones = np.ones((1, 16), np.float32)
    with serve(models.root, exit_on_error=False) as server:
        np.testing.assert_array_equal(server.infer("good", {"A": ones, "B": ones}).outputs["S"], 2 * ones)
        return next(entry.reason for entry in server.index() if entry.name == "m")


# ---------------------------------------------------------------------------- IR


def write_ir(models: Any) -> Path:
    """``y = x + w`` for f32[rows, 64], with 256 bytes of weights; the version's directory."""
    weights = np.arange(64, dtype=np.float32).reshape(1, 64)
    version: Path = models.save(
        lambda x: {"y": opset13.add(x, opset13.constant(weights))}, {"x": (openvino.Type.f32, [-1, 64])}
    )
    return version


@pytest.mark.parametrize("size", [0, 5, 252])
def test_weights_shorter_than_the_graph_declares_are_refused(models: Any, size: int) -> None:
    file = write_ir(models) / "model.bin"
    assert file.stat().st_size == 256
    file.write_bytes(file.read_bytes()[:size])
    assert "m/1/model.bin" in (message := reason(models))
    assert "Incorrect weights in bin file" in message


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ('offset="999999999999"', 'offset="0"'),
        ('offset="-8"', 'offset="0"'),
        ('offset="18446744073709551615"', 'offset="0"'),
        ('size="999999999999"', 'size="256"'),
        ('size="18446744073709551615"', 'size="256"'),
        ('shape="1, 1099511627776"', 'shape="1, 64"'),
        ('type="NoSuchLayer"', 'type="Add"'),
        ('to-layer="77"', 'to-layer="2"'),
    ],
)
def test_a_graph_with_wrong_values_is_refused(models: Any, wrong: str, right: str) -> None:
    file = write_ir(models) / "model.xml"
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong))
    assert "m/1/model.xml" in reason(models)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 0.98])
def test_a_graph_that_is_cut_off_is_refused(models: Any, part: float) -> None:
    file = write_ir(models) / "model.xml"
    text = file.read_text()
    file.write_text(text[: int(len(text) * part)])
    assert "m/1/model.xml" in reason(models)


ENTITIES = {
    "laughs": "".join(f'<!ENTITY e{level} "{f"&e{level - 1};" * 10}">' for level in range(1, 12))
    + '<!ENTITY e0 "laugh"><!ENTITY last "&e11;">',
    "file": '<!ENTITY last SYSTEM "file:///etc/passwd">',
}


@pytest.mark.parametrize("entities", ENTITIES.values(), ids=ENTITIES)
def test_entities_are_not_expanded(models: Any, entities: str) -> None:
    """A tensor has the literal name ``&last;``; the entity is not resolved."""
    file = write_ir(models) / "model.xml"
    head, body = file.read_text().split("?>", 1)
    renamed = body.replace('names="y"', 'names="&last;"')
    file.write_text(f"{head}?>\n<!DOCTYPE net [{entities}]>{renamed}")
    with serve(models.root) as server:
        (output,) = server.resolve("m").config.output
    assert output.name == "&last;"


def test_deep_elements_are_no_graph(models: Any) -> None:
    file = write_ir(models) / "model.xml"
    file.write_text('<net name="a" version="11">' + "<a>" * 100_000 + "</a>" * 100_000 + "</net>")
    assert "it has no outputs" in reason(models)


def test_weights_that_are_shortened_while_they_are_served_end_nothing(models: Any) -> None:
    """OpenVINO would map the file. In a process, so that a broken guard ends that and not the tests."""
    weights = np.arange(1 << 21, dtype=np.float32)
    version = models.save(
        lambda x: {"y": opset13.multiply(x, opset13.constant(weights))}, {"x": (openvino.Type.f32, [1])}
    )
    models.parameter("isolation", "process")
    with serve(models.root) as server:
        (version / "model.bin").write_bytes(b"")
        y = server.infer("m", {"x": np.array([2], np.float32)}).outputs["y"]
    np.testing.assert_array_equal(y, 2 * weights)


# ---------------------------------------------------------------------------- ONNX


def write_onnx(models: Any, nodes: list[onnx.NodeProto], weights: list[TensorProto], config: str = "") -> Path:
    """The file, whose graph has the input ``x`` and the output ``y``, both f32[rows, 4]."""
    version: Path = models.root / "m" / "1"
    version.mkdir(parents=True)
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, IO)] for name in "xy")
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (version / "model.onnx").write_bytes(proto.SerializeToString())
    models.config(f'backend: "openvino" default_model_filename: "model.onnx" {config}')
    return version / "model.onnx"


def test_a_graph_that_is_a_circle_is_refused(models: Any) -> None:
    node = helper.make_node
    write_onnx(models, [node("Add", ["x", "b"], ["a"]), node("Add", ["a", "x"], ["b"]), node("Neg", ["a"], ["y"])], [])
    assert "m/1/model.onnx" in reason(models)


@pytest.mark.parametrize("dims", [[1 << 40, 4], [1 << 62, 4], [1 << 32, 1 << 32], [-4], [5]])
def test_weights_whose_size_differs_from_their_shape_are_refused(models: Any, dims: list[int]) -> None:
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, raw_data=b"\0" * 16)
    write_onnx(models, [helper.make_node("Add", ["x", "w"], ["y"])], [weights])
    assert "m/1/model.onnx" in reason(models)


@pytest.mark.parametrize("cut", [lambda whole: whole[: len(whole) // 2], lambda whole: b"", lambda whole: whole[3:]])
def test_a_file_that_is_cut_off_is_refused(models: Any, cut: Callable[[bytes], bytes]) -> None:
    file = write_onnx(models, [helper.make_node("Neg", ["x"], ["y"])], [])
    file.write_bytes(cut(file.read_bytes()))
    assert "m/1/model.onnx" in reason(models)


def test_weights_in_another_file_are_not_mapped_either(models: Any) -> None:
    """One row is broadcast to the rows of the weights, so that they are used unchanged."""
    weights = np.arange(1 << 22, dtype=np.float32).reshape(-1, 4)
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=weights.shape, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights.bin")
    isolation = 'parameters { key: "isolation" value { string_value: "process" } }'
    file = write_onnx(models, [helper.make_node("Mul", ["x", "w"], ["y"])], [tensor], isolation)
    (file.parent / "weights.bin").write_bytes(weights.tobytes())
    with serve(models.root) as server:
        (file.parent / "weights.bin").write_bytes(b"")
        y = server.infer("m", {"x": np.ones((1, 4), np.float32)}).outputs["y"]
    np.testing.assert_array_equal(y, weights)


def huge(models: Any, config: str = "") -> None:
    """A graph that creates 4 TiB of zeros."""
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    write_onnx(models, nodes, [numpy_helper.from_array(np.array([1 << 40], np.int64), "shape")], config)


def test_a_graph_larger_than_memory_is_refused(models: Any) -> None:
    huge(models)
    assert "bad_alloc" in reason(models)


def test_a_process_bounds_the_memory_of_a_graph(models: Any) -> None:
    """8 GiB, which a machine may have. OpenVINO allocates them in the model's process."""
    nodes = [
        helper.make_node("Expand", ["x", "shape"], ["many"]),
        helper.make_node("ReduceSum", ["many"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    settings = {"isolation": "process", "memory_limit_bytes": str(4 << 30)}
    config = "".join(
        f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in settings.items()
    )
    sample = 'inputs { key: "x" value { data_type: TYPE_FP32 dims: [4] zero_data: true } }'
    config += f' model_warmup {{ name: "w" batch_size: 1 {sample} }}'
    write_onnx(models, nodes, [numpy_helper.from_array(np.array([1 << 29, 1, 1], np.int64), "shape")], config)
    assert "Failed to allocate" in reason(models)


def test_a_name_that_is_not_utf8_is_refused(models: Any) -> None:
    file = write_onnx(models, [helper.make_node("Neg", ["x"], ["y"])], [])
    file.write_bytes(file.read_bytes().replace(b"\1y", b"\1\xff"))
    assert "unable to load model 'm': the name of a tensor is not UTF-8" in reason(models)


def test_a_request_that_ends_the_engine_ends_its_process_only(models: Any, wait_until: Callable[..., None]) -> None:
    """OpenVINO divides by a step of zero, with the processor's own word for it."""
    version = models.root / "m" / "1"
    version.mkdir(parents=True)
    scalar = helper.make_tensor_value_info
    node = helper.make_node("Range", ["x", "limit", "step"], ["y"])
    inputs = [scalar(name, TensorProto.INT64, []) for name in ("x", "limit", "step")]
    graph = helper.make_graph([node], "g", inputs, [scalar("y", TensorProto.INT64, ["n"])])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (version / "model.onnx").write_bytes(proto.SerializeToString())
    models.parameter("isolation", "process", 'backend: "openvino" default_model_filename: "model.onnx"')

    def ask(step: int) -> Any:
        values = {"x": 0, "limit": 3, "step": step}
        return server.infer("m", {name: np.array([value], np.int64) for name, value in values.items()}).outputs["y"]

    def is_back() -> bool:
        with contextlib.suppress(Unavailable):
            return bool(ask(1).tolist() == [0, 1, 2])
        return False

    with serve(models.root) as server:
        assert ask(1).tolist() == [0, 1, 2]
        with pytest.raises(Unavailable, match=r"'m_0' is not healthy.*SIGFPE"):
            ask(0)
        wait_until(is_back, "another process has taken its place")
