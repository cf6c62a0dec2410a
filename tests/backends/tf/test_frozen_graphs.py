"""Frozen graphs, whose inputs and outputs the config must name."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest

from headrace_testing.serving import serve

tf = pytest.importorskip("tensorflow")

X = np.array([[1, 2], [3, -4]], np.float32)


def io(direction: str, name: str, dims: str = "[2]", kind: str = "FP32", more: str = "") -> str:
    return f'{direction} {{ name: "{name}" data_type: TYPE_{kind} dims: {dims} {more} }} '


def config(*tensors: str, batch: int = 4) -> str:
    return f'platform: "tensorflow_graphdef" max_batch_size: {batch} ' + "".join(tensors)


def placeholder(name: str = "x", shape: Any = (None, 2), kind: Any = tf.float32) -> Any:
    return tf.compat.v1.placeholder(kind, shape, name=name)


def twice() -> None:
    tf.multiply(placeholder(), 2.0, name="y")


def split() -> None:
    tf.split(placeholder(shape=(None, 4)), 2, axis=1, name="halves")


def test_a_frozen_graph_is_served_by_the_names_of_its_nodes(models: Any) -> None:
    models.frozen(twice)
    models.config(config(io("input", "x"), io("output", "y")))
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], 2 * X)


def test_a_tensor_may_be_named_where_its_node_has_several(models: Any) -> None:
    models.frozen(split)
    models.config(config(io("input", "x:0", "[4]"), io("output", "halves:1"), io("output", "halves")))
    whole = np.arange(8, dtype=np.float32).reshape(2, 4)
    with serve(models.root) as server:
        outputs = server.infer("m", {"x:0": whole}).outputs
    np.testing.assert_array_equal(outputs["halves"], whole[:, :2])
    np.testing.assert_array_equal(outputs["halves:1"], whole[:, 2:])


@pytest.mark.parametrize("kind", ["Placeholder", "PlaceholderWithDefault"])
def test_an_input_may_have_a_default(models: Any, kind: str) -> None:
    def build() -> None:
        x = placeholder(shape=(2,))
        default = tf.constant([2.0])
        scale = placeholder("scale", (1,)) if kind == "Placeholder" else None
        scale = tf.compat.v1.placeholder_with_default(default, [1], name="scale") if scale is None else scale
        tf.multiply(x, scale, name="y")

    models.frozen(build)
    tensors = io("input", "x"), io("input", "scale", "[1]", more="optional: true"), io("output", "y")
    models.config(config(*tensors, batch=0))
    if kind == "Placeholder":
        assert "configuration expects 1 inputs, model provides 2" in models.reason()
        return
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X[0]}).outputs["y"], 2 * X[0])
        inputs = {"x": X[0], "scale": np.array([5], np.float32)}
        np.testing.assert_array_equal(server.infer("m", inputs).outputs["y"], 5 * X[0])


def test_a_shape_that_the_file_lacks_is_taken_from_the_config(models: Any) -> None:
    models.frozen(lambda: tf.multiply(placeholder(shape=None), 2.0, name="y"))
    models.config(config(io("input", "x"), io("output", "y")))
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], 2 * X)


def test_a_padded_input_has_its_mask(models: Any) -> None:
    """The file has no shape. The mask has a row for each request, of the bucket's length."""

    def build() -> None:
        tf.reduce_sum(placeholder(shape=(None, None)) * placeholder("mask", None), axis=1, keepdims=True, name="y")

    models.frozen(build)
    mask = {"name": "mask", "data_type": "TYPE_FP32"}
    padding = json.dumps({"pad": [{"input": "x", "axis": 0, "buckets": [4], "value": 9, "mask": mask}]})
    models.config(config(io("input", "x", "[-1]"), io("output", "y", "[1]"), models.parameters(padding=padding)))
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], X.sum(1, keepdims=True))


def test_a_scalar_is_one_value(models: Any) -> None:
    models.frozen(lambda: tf.multiply(placeholder(shape=()), 2.0, name="y"))
    models.config(config(io("input", "x", "[1]"), io("output", "y", "[1]"), batch=0))
    with serve(models.root) as server:
        found = server.infer("m", {"x": np.array([4], np.float32)}).outputs["y"]
    np.testing.assert_array_equal(found, np.array([8], np.float32))
    models.config(config(io("input", "x"), io("output", "y", "[1]"), batch=0))
    assert "scalar tensor 'x', should only provide 1 in the model configuration" in models.reason()


def test_in_a_graph_of_old_a_placeholder_without_dims_has_any_shape(models: Any) -> None:
    file = models.frozen(lambda: tf.multiply(placeholder(shape=()), 2.0, name="y")) / "model.graphdef"
    graph = tf.compat.v1.GraphDef.FromString(file.read_bytes())
    graph.versions.producer = 20
    for node in graph.node:
        node.attr.pop("_output_shapes", None)
    file.write_bytes(graph.SerializeToString())
    models.config(config(io("input", "x"), io("output", "y")))
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], 2 * X)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ("", "a frozen graph does not tell its inputs and outputs, so the model configuration must name both"),
        (io("input", "x"), "a frozen graph does not tell its inputs and outputs"),
        (io("input", "z") + io("output", "y"), "unexpected inference input 'z', allowed inputs are: x"),
        (io("input", "x") + io("output", "z"), "unexpected inference output 'z', allowed outputs are: y, y/y"),
        (io("input", "x") + io("output", "y:3"), "unexpected inference output 'y:3': "),
        (
            io("input", "x") + io("input", "w") + io("output", "y"),
            "configuration expects 2 inputs, model provides at most 1",
        ),
        (
            io("input", "x", kind="INT32") + io("output", "y"),
            "configuration expects datatype TYPE_INT32 for input 'x', model provides TYPE_FP32",
        ),
        (
            io("input", "x") + io("output", "y", kind="INT64"),
            "configuration expects datatype TYPE_INT64 for output 'y', model provides TYPE_FP32",
        ),
        (io("input", "x", "[3]") + io("output", "y"), "tensor 'x': the model expects 2 dimensions (shape [-1,2])"),
        (io("input", "x") + io("output", "y", "[3]"), "tensor 'y': the model expects 2 dimensions (shape [-1,2])"),
    ],
)
def test_a_config_that_contradicts_the_graph_is_refused(models: Any, tensors: str, message: str) -> None:
    models.frozen(twice)
    models.config(config(tensors))
    assert message in models.reason()


def test_the_error_lists_the_nearest_of_many_names(models: Any) -> None:
    def build() -> None:
        x = placeholder()
        for number in range(40):
            x = tf.add(x, 1.0, name=f"layer_{number}")

    models.frozen(build)
    models.config(config(io("input", "x"), io("output", "layer_399")))
    message = models.reason()
    assert "unexpected inference output 'layer_399', allowed outputs are: layer_39" in message
    assert message.endswith(" more")


def test_a_placeholder_that_no_input_feeds_is_refused_at_load(models: Any) -> None:
    def build() -> None:
        x = placeholder()
        tf.multiply(x, placeholder("keep_probability", ()), name="y")
        tf.add(x, 1.0, name="z")

    models.frozen(build)
    models.config(config(io("input", "x"), io("output", "y")))
    assert "need the placeholder 'keep_probability', which is none of the inputs x" in models.reason()
    models.config(config(io("input", "x"), io("output", "z")))
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["z"], X + 1)


@pytest.mark.parametrize("size", [0, 5, 60])
def test_a_graph_that_is_cut_off_is_named(models: Any, size: int) -> None:
    file = models.frozen(twice) / "model.graphdef"
    file.write_bytes(file.read_bytes()[:size])
    models.config(config(io("input", "x"), io("output", "y")))
    assert "m/1/model.graphdef'" in models.reason()


def test_a_saved_model_in_the_place_of_a_frozen_graph_is_refused(models: Any) -> None:
    version = models.add()
    models.config(config(io("input", "x"), io("output", "y")))
    shutil.move(version / "model.savedmodel", version / "model.graphdef")
    assert "m/1/model.graphdef': Is a directory; a frozen graph is a file" in models.reason()
    content = (version / "model.graphdef/saved_model.pb").read_bytes()
    shutil.rmtree(version / "model.graphdef")
    (version / "model.graphdef").write_bytes(content)
    assert "m/1/model.graphdef'" in (message := models.reason())
    assert "empty network" in message or "is no frozen graph" in message


def test_a_file_of_another_name_is_found_by_the_config(models: Any) -> None:
    version = models.frozen(twice)
    (version / "model.graphdef").rename(version / "frozen.pb")
    tensors = io("input", "x") + io("output", "y")
    config = f'default_model_filename: "frozen.pb" max_batch_size: 4 {tensors}'
    models.config(f'backend: "tensorflow" {config}')
    assert 'a frozen graph has platform: "tensorflow_graphdef"' in models.reason()
    models.config(f'platform: "tensorflow_graphdef" {config}')
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], 2 * X)


# ---------------------------------------------------------------------- TF_INIT_OPS_FILE


def initialised() -> None:
    """``y = x * v`` where ``v`` is 0 until ``init`` has run."""
    variable = tf.compat.v1.get_variable("v", initializer=5.0)
    tf.multiply(placeholder(), variable, name="y")
    tf.group(variable.initializer, name="init")


@pytest.mark.parametrize("places", [("1",), (".",), ("1", ".")])
def test_operators_run_once_at_load(models: Any, places: tuple[str, ...]) -> None:
    """The version's file takes precedence over the model's."""
    models.frozen(initialised)
    for place in places:
        text = '{"init_ops": ["init"]}' if place == places[0] else '{"init_ops": ["no such operator"]}'
        (models.root / "m" / place / "init.json").write_text(text)
    models.config(config(io("input", "x"), io("output", "y")) + models.parameters(TF_INIT_OPS_FILE="init.json"))
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], 5 * X)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"init_ops": ["nobody"]}', "'nobody'"),
        ('{"init_ops": "init"}', "m/1/init.json': 'init_ops' must be a list of the names of operators"),
        ('{"init_ops": [1]}', "m/1/init.json': 'init_ops' must be a list of the names of operators"),
        ('{"ops": []}', "m/1/init.json' must be JSON with a list 'init_ops' of the names of operators"),
        ("[]", "m/1/init.json' must be JSON"),
        ("{", "m/1/init.json' must be JSON"),
        ("\xff", "m/1/init.json' must be JSON"),
        (None, "init.json' for model 'm' version 1"),
    ],
)
def test_an_unreadable_file_of_operators_is_refused(models: Any, content: str | None, message: str) -> None:
    version = models.frozen(initialised)
    if content is not None:
        (version / "init.json").write_text(content, encoding="latin-1")
    models.config(config(io("input", "x"), io("output", "y")) + models.parameters(TF_INIT_OPS_FILE="init.json"))
    assert message in models.reason()


def test_a_file_of_operators_elsewhere_is_refused(models: Any) -> None:
    models.frozen(initialised)
    tensors = io("input", "x"), io("output", "y")
    models.config(config(*tensors) + models.parameters(TF_INIT_OPS_FILE="../../init.json"))
    assert "is outside the model directory" in models.reason()


def test_without_them_the_first_request_fails_with_the_missing_operator(models: Any) -> None:
    models.frozen(initialised)
    models.config(config(io("input", "x"), io("output", "y")))
    with serve(models.root) as server, pytest.raises(Exception, match="variable v"):
        server.infer("m", {"x": X})
