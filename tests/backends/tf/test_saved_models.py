"""SavedModels of every make, whole and broken; TensorFlow, called directly, is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import BytesTensor, InvalidArgument
from headrace_testing.serving import serve

tf = pytest.importorskip("tensorflow")

SPEC = tf.TensorSpec([None, 2], tf.float32, name="x")
X = np.array([[1, 2], [3, -4], [0.5, 0]], np.float32)


def weighted(models: Any, **signatures: Any) -> Path:
    """``y = x @ w``; its variables lie in two shards."""
    module = tf.Module()
    module.weights = tf.Variable(np.arange(6, dtype=np.float32).reshape(2, 3))
    version: Path = models.save(lambda x: {"y": x @ module.weights}, SPEC, module=module, **signatures)
    return version


def directly(version: Path, **inputs: Any) -> dict[str, Any]:
    """Return the outputs of TensorFlow, called directly."""
    function = tf.saved_model.load(str(version / "model.savedmodel")).signatures["serving_default"]
    return {name: value.numpy() for name, value in function(**{k: tf.constant(v) for k, v in inputs.items()}).items()}


# ---------------------------------------------------------------------- makes


def test_variables_are_restored(models: Any) -> None:
    version = weighted(models)
    with serve(models.root) as server:
        y = server.infer("m", {"x": X}).outputs["y"]
    np.testing.assert_array_equal(y, directly(version, x=X)["y"])
    np.testing.assert_array_equal(y, X @ np.arange(6, dtype=np.float32).reshape(2, 3))


def test_a_model_that_keras_exports_is_served(models: Any) -> None:
    import keras

    keras.utils.set_random_seed(3)
    network = keras.Sequential(
        [
            keras.layers.Input((6, 6, 1), name="image"),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    version = models.root / "m/1"
    network.export(str(version / "model.savedmodel"), verbose=False)
    image = np.random.default_rng(5).normal(size=(3, 6, 6, 1)).astype(np.float32)
    with serve(models.root) as server:
        (input_name,) = server.resolve("m").inputs
        ((_, found),) = server.infer("m", {input_name: image}).outputs.items()
    ((_, expected),) = directly(version, **{input_name: image}).items()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, network.predict(image, verbose=0), rtol=1e-5, atol=1e-6)


def test_a_model_of_tensorflow_1_is_served(models: Any) -> None:
    """Variables by reference, a table that is filled from an asset, and a placeholder that has a default."""
    v1 = tf.compat.v1
    words = models.root.parent / "words.txt"
    words.write_text("zero\none\n")
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        word = v1.placeholder(tf.string, [None, 1], name="word")
        scale = v1.placeholder_with_default(2.0, [], name="scale")
        y = x * v1.get_variable("v", initializer=[3.0, 4.0], use_resource=False) * scale
        whole, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
        initializer = tf.lookup.TextFileInitializer(str(words), tf.string, whole, tf.int64, number)
        index = tf.lookup.StaticHashTable(initializer, -1).lookup(word)
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        builder = v1.saved_model.Builder(str(models.root / "m/1/model.savedmodel"))
        info = v1.saved_model.build_tensor_info
        signature = v1.saved_model.build_signature_def(
            {"x": info(x), "word": info(word)}, {"y": info(y), "index": info(index)}
        )
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            {"serving_default": signature},
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=v1.tables_initializer(),
        )
        builder.save()
    words.unlink()
    with serve(models.root) as server:
        answer = server.infer("m", {"x": X[:2], "word": BytesTensor.from_items([b"one", b"?"], (2, 1))}).outputs
    np.testing.assert_array_equal(answer["y"], X[:2] * [6, 8])
    np.testing.assert_array_equal(answer["index"], [[1], [-1]])


@pytest.mark.parametrize(("signature", "factor"), [("", 1), ("serving_default", 1), ("twice", 2), ("thrice", 3)])
def test_the_signature_is_chosen(models: Any, signature: str, factor: int) -> None:
    models.save(lambda x: {"y": x}, SPEC, twice=lambda x: {"y": 2 * x}, thrice=lambda x: {"y": 3 * x})
    models.config(models.parameters(TF_SIGNATURE_DEF=signature) if signature else "")
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], factor * X)


def test_the_error_for_an_unknown_signature_lists_the_existing_ones(models: Any) -> None:
    models.save(lambda x: {"y": x}, SPEC, twice=lambda x: {"y": 2 * x})
    models.config(models.parameters(TF_SIGNATURE_DEF="other"))
    assert "expected 'other' signature; it has: serving_default, twice" in models.reason()


def test_without_the_default_signature_the_first_is_taken(models: Any, caplog: pytest.LogCaptureFixture) -> None:
    models.save(lambda x: {"y": x}, SPEC, twice=lambda x: {"y": 2 * x}, thrice=lambda x: {"y": 3 * x})
    models.edit(lambda meta: meta.signature_def.pop("serving_default"))
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], 3 * X)
    assert "unable to find default serving signature 'serving_default', using signature 'thrice'" in caplog.text


def tagged(models: Any) -> None:
    """A graph for ``serve``, and one for ``serve`` and ``gpu``, which returns twice the value."""
    v1 = tf.compat.v1
    builder = v1.saved_model.Builder(str(models.root / "m/1/model.savedmodel"))
    for factor, tags in ((2.0, ["serve", "gpu"]), (1.0, ["serve"])):
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [None, 2], name="x")
            y = x * v1.get_variable("v", initializer=[1.0, 1.0]) * factor
            session.run(v1.global_variables_initializer())
            info = v1.saved_model.build_tensor_info
            signature = v1.saved_model.build_signature_def({"x": info(x)}, {"y": info(y)})
            if factor == 2:
                builder.add_meta_graph_and_variables(session, tags, {"serving_default": signature})
            else:
                builder.add_meta_graph(tags, {"serving_default": signature})
    builder.save()


@pytest.mark.parametrize(("tag", "factor"), [("", 1), ("serve", 1), ("gpu", 2)])
def test_the_graph_is_chosen_by_its_tag(models: Any, tag: str, factor: int) -> None:
    tagged(models)
    models.config(models.parameters(TF_GRAPH_TAG=tag) if tag else "")
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], factor * X)


def test_the_error_for_an_unknown_tag_lists_the_existing_ones(models: Any) -> None:
    tagged(models)
    models.config(models.parameters(TF_GRAPH_TAG="tpu"))
    assert "expected 'tpu' tag; the graphs of '" in (message := models.reason())
    assert message.endswith("have: gpu,serve; serve")


def test_a_saved_model_in_text_form_is_served(models: Any) -> None:
    from google.protobuf import text_format
    from tensorflow.core.protobuf import saved_model_pb2

    file = weighted(models) / "model.savedmodel/saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    file.with_suffix(".pbtxt").write_text(text_format.MessageToString(saved))
    file.unlink()
    with serve(models.root) as server:
        assert server.infer("m", {"x": X}).outputs["y"].shape == (3, 3)


def test_a_variable_of_tensorflow_1_is_served(models: Any) -> None:
    """Its type is a reference, ``float32_ref``."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session() as session:
        v1.get_variable("v", initializer=[3.0, 4.0], use_resource=False)
        session.run(v1.global_variables_initializer())
        x, v = v1.placeholder(tf.float32, [2], name="x"), graph.get_tensor_by_name("v:0")
        assert v.dtype.name == "float32_ref"
        v1.saved_model.simple_save(session, str(models.root / "m/1/model.savedmodel"), {"x": x}, {"y": x + 1, "v": v})
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X[0]}).outputs["v"], [3, 4])


# ---------------------------------------------------------------------- broken


def test_a_missing_directory_of_variables_is_named(models: Any) -> None:
    """TensorFlow's own loader reports this only when the first request reads a variable."""
    import shutil

    shutil.rmtree(weighted(models) / "model.savedmodel/variables")
    assert "variables/variables.index', and the graph has variables" in models.reason()


@pytest.mark.parametrize("file", ["variables.index", "variables.data-00000-of-00001"])
@pytest.mark.parametrize("size", [0, 30])
def test_variables_that_are_cut_off_are_refused_at_load(models: Any, file: str, size: int) -> None:
    path = weighted(models) / "model.savedmodel/variables" / file
    path.write_bytes(path.read_bytes()[:size])
    assert "m/1/model.savedmodel': " in models.reason()


def test_missing_data_of_variables_is_refused_at_load(models: Any) -> None:
    (weighted(models) / "model.savedmodel/variables/variables.data-00000-of-00001").unlink()
    assert "m/1/model.savedmodel': " in models.reason()


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_saved_model_that_is_cut_off_is_named(models: Any, part: float) -> None:
    file = weighted(models) / "model.savedmodel/saved_model.pb"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(part * len(whole))])
    assert "m/1/model.savedmodel/saved_model.pb' is no SavedModel: " in models.reason()


def test_a_directory_without_the_file_is_named(models: Any) -> None:
    (weighted(models) / "model.savedmodel/saved_model.pb").unlink()
    assert "saved_model.pb': No such file or directory; a SavedModel is a directory with that file" in models.reason()


def test_a_frozen_graph_in_the_place_of_a_saved_model_is_refused(models: Any) -> None:
    file = weighted(models) / "model.savedmodel/saved_model.pb"
    with tf.Graph().as_default() as graph:
        tf.compat.v1.placeholder(tf.float32, [None, 2], name="x")
    file.write_bytes(graph.as_graph_def().SerializeToString())
    assert "there is no graph in it. A frozen graph is served as model.graphdef, a file" in models.reason()


def test_a_file_in_the_place_of_the_directory_is_refused(models: Any) -> None:
    version = models.root / "m/1"
    version.mkdir(parents=True)
    (version / "model.savedmodel").write_bytes(b"x")
    models.config('platform: "tensorflow_savedmodel"')
    assert "m/1/model.savedmodel/saved_model.pb': Not a directory" in models.reason()


def test_a_placeholder_that_no_input_feeds_is_refused_at_load(models: Any) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        y = x * v1.placeholder(tf.float32, [], name="keep_probability")
        v1.saved_model.simple_save(session, str(models.root / "m/1/model.savedmodel"), {"x": x}, {"y": y})
    assert "need the placeholder 'keep_probability', which is none of the inputs x" in models.reason()


def test_an_unknown_operator_is_refused(models: Any) -> None:
    models.save(lambda x: {"y": tf.nn.relu(x)}, SPEC)

    def change(meta: Any) -> None:
        for function in meta.graph_def.library.function:
            for node in function.node_def:
                node.op = node.op.replace("Relu", "HeadraceUnknown")

    models.edit(change)
    assert "the operator 'HeadraceUnknown'" in models.reason()
    models.config(models.parameters(trust="true"))
    message = models.reason()
    assert "'HeadraceUnknown'" in message
    assert "running on" not in message  # TensorFlow names the machine


# ---------------------------------------------------------------------- inputs and outputs


def io(direction: str, name: str, dims: Any, kind: str = "FP32", more: str = "") -> str:
    return f'{direction} {{ name: "{name}" data_type: TYPE_{kind} dims: {dims} {more} }} '


BATCHED = 'backend: "tensorflow" max_batch_size: 4 '
PLAIN = 'backend: "tensorflow" '


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (io("input", "x", [2]), "configuration expects 1 inputs, model provides 2"),
        (io("input", "x", [2]) + io("input", "z", [2]), "unexpected inference input 'z', allowed inputs are: w, x"),
        (
            io("input", "x", [2]) + io("input", "w", [2], "INT32"),
            "configuration expects datatype TYPE_INT32 for input 'w', model provides TYPE_FP32",
        ),
        (
            io("input", "x", [3]) + io("input", "w", [2]),
            "tensor 'x': the model expects 2 dimensions (shape [-1,2]) but the model configuration specifies 2 "
            "dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
            "making complete shape [-1,3])",
        ),
        (
            io("input", "x", [2, 1]) + io("input", "w", [2]),
            "tensor 'x': the model expects 2 dimensions (shape [-1,2]) but the model configuration specifies 3",
        ),
    ],
)
def test_a_config_that_contradicts_the_model_is_refused(models: Any, config: str, message: str) -> None:
    models.save(lambda x, w: {"y": x + w}, SPEC, tf.TensorSpec([None, 2], tf.float32, name="w"))
    models.config(BATCHED + config + io("output", "y", [2]))
    assert message in models.reason()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (io("output", "z", [2]), "unexpected inference output 'z', allowed outputs are: y"),
        (
            io("output", "y", [2], "FP64"),
            "configuration expects datatype TYPE_FP64 for output 'y', model provides TYPE_FP32",
        ),
        (io("output", "y", [1]), "tensor 'y': the model expects 2 dimensions (shape [-1,2])"),
    ],
)
def test_an_output_that_the_model_lacks_is_refused(models: Any, output: str, message: str) -> None:
    models.save(lambda x: {"y": x}, SPEC)
    models.config(BATCHED + io("input", "x", [2]) + output)
    assert message in models.reason()


def test_a_model_without_a_batch_axis_cannot_batch(models: Any) -> None:
    models.save(lambda x: {"y": x}, tf.TensorSpec([3, 2], tf.float32, name="x"))
    models.config("max_batch_size: 4")
    assert "model does not support batching while non-zero max_batch_size is specified" in models.reason()
    models.config(BATCHED + io("input", "x", [2]) + io("output", "y", [2]))
    assert "for the model to support batching the shape should have at least 1 dimension" in models.reason()


def test_some_of_the_outputs_may_be_named(models: Any) -> None:
    models.add()
    models.config(BATCHED + io("input", "A", [16]) + io("input", "B", [16]) + io("output", "D", [16]))
    a, b = np.random.default_rng(2).normal(size=(2, 3, 16)).astype(np.float32)
    with serve(models.root) as server:
        outputs = server.infer("m", {"A": a, "B": b}).outputs
    assert list(outputs) == ["D"]
    np.testing.assert_array_equal(outputs["D"], a - b)


@pytest.mark.parametrize(("option", "batch"), [({}, 4), ({"default-max-batch-size": "7"}, 7)])
def test_a_config_is_completed(models: Any, option: dict[str, str], batch: int) -> None:
    models.add()
    with serve(models.root, backend_config={"tensorflow": option}) as server:
        config = server.resolve("m").config
    assert (config.platform, config.max_batch_size) == ("tensorflow_savedmodel", batch)
    assert [(each.name, list(each.dims)) for each in config.input] == [("A", [16]), ("B", [16])]
    assert [(each.name, list(each.dims)) for each in config.output] == [("D", [16]), ("S", [16])]
    assert config.HasField("dynamic_batching")


def test_a_scalar_has_dims_one(models: Any) -> None:
    models.save(lambda x: {"y": -x}, tf.TensorSpec([], tf.float32, name="x"))
    with serve(models.root) as server:
        config = server.resolve("m").config
        assert (list(config.input[0].dims), config.max_batch_size) == ([1], 0)
        found = server.infer("m", {"x": np.array([2.5], np.float32)}).outputs["y"]
    assert found.shape == (1,)
    np.testing.assert_array_equal(found, np.array([-2.5], np.float32))


def test_a_scalar_that_the_config_gives_more_dims_is_refused(models: Any) -> None:
    models.save(lambda x: {"y": -x}, tf.TensorSpec([], tf.float32, name="x"))
    models.config(PLAIN + io("input", "x", [2]) + io("output", "y", [1]))
    assert "scalar tensor 'x', should only provide 1 in the model configuration" in models.reason()


def test_a_rank_that_the_file_lacks_is_taken_from_the_config(models: Any) -> None:
    models.save(lambda x: {"y": 2 * x}, tf.TensorSpec(None, tf.float32, name="x"))
    assert "unable to autofill for 'm': the rank of model tensor 'x' is 0 which is not supported" in models.reason()
    models.config(BATCHED + io("input", "x", [2]) + io("output", "y", [2]))
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], 2 * X)


@pytest.mark.parametrize("rank", range(1, 7))
def test_every_rank_is_served(models: Any, rank: int) -> None:
    models.save(lambda x: {"y": x + 1}, tf.TensorSpec([None] * rank, tf.int32, name="x"))
    shape = (2, *range(1, rank))
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    models.config(
        'backend: "tensorflow"' + io("input", "x", [-1] * rank, "INT32") + io("output", "y", [-1] * rank, "INT32")
    )
    empty = np.zeros((*shape[:-1], 0), np.int32)
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": x}).outputs["y"], x + 1)
        assert server.infer("m", {"x": empty}).outputs["y"].shape == empty.shape


@pytest.mark.parametrize("kind", ["complex64", "qint8"])
def test_a_type_that_no_request_can_carry_is_refused(models: Any, kind: str) -> None:
    models.save(lambda x: {"y": tf.identity(x)}, tf.TensorSpec([None, 2], getattr(tf, kind), name="x"))
    assert f"unsupported datatype {kind} for input 'x'" in models.reason()


def test_an_input_with_a_default_may_be_left_out(models: Any) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [2], name="x")
        scale = v1.placeholder_with_default([2.0], [1], name="scale")
        inputs = {"x": x, "scale": scale}
        v1.saved_model.simple_save(session, str(models.root / "m/1/model.savedmodel"), inputs, {"y": x * scale})
    x_and_y = io("input", "x", [2]) + io("output", "y", [2])
    models.config(PLAIN + x_and_y + io("input", "scale", [1], more="optional: true"))
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X[0]}).outputs["y"], 2 * X[0])
        inputs = {"x": X[0], "scale": np.array([5], np.float32)}
        np.testing.assert_array_equal(server.infer("m", inputs).outputs["y"], 5 * X[0])
    models.config(PLAIN + x_and_y + io("input", "scale", [1]))
    with serve(models.root) as server:
        with pytest.raises(InvalidArgument, match="scale"):
            server.infer("m", {"x": X[0]})
        np.testing.assert_array_equal(server.infer("m", inputs).outputs["y"], 5 * X[0])


def give_default(meta: Any, value: Any) -> None:
    meta.signature_def["serving_default"].defaults["scale"].CopyFrom(tf.make_tensor_proto(value))


def test_an_input_that_the_signature_has_a_default_for_may_be_left_out(models: Any) -> None:
    models.save(lambda x, scale: {"y": x * scale}, SPEC, tf.TensorSpec([], tf.float32, name="scale"))
    models.edit(
        lambda meta: meta.signature_def["serving_default"].defaults["scale"].CopyFrom(tf.make_tensor_proto(3.0))
    )
    with serve(models.root) as server:
        assert [each.name for each in server.resolve("m").config.input] == ["x"]
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], 3 * X)


def test_an_optional_input_without_a_default_is_refused(models: Any) -> None:
    models.save(lambda x: {"y": x}, tf.TensorSpec([2], tf.float32, name="x"))
    models.config(PLAIN + io("input", "x", [2], more="optional: true") + io("output", "y", [2]))
    assert "configuration expects 0 inputs, model provides 1" in models.reason()


def test_an_optional_input_of_a_model_that_batches_is_refused(models: Any) -> None:
    models.save(lambda x, scale: {"y": x * scale}, SPEC, tf.TensorSpec([None, 1], tf.float32, name="scale"))
    models.edit(
        lambda meta: meta.signature_def["serving_default"].defaults["scale"].CopyFrom(tf.make_tensor_proto([[3.0]]))
    )
    models.config(
        BATCHED + io("input", "x", [2]) + io("input", "scale", [1], more="optional: true") + io("output", "y", [2])
    )
    assert "optional input 'scale' is not supported for models that support batching" in models.reason()


def test_a_ragged_input_has_its_elements(models: Any) -> None:
    inputs = [tf.TensorSpec([None], tf.float32, name="x"), tf.TensorSpec([None], tf.int32, name="sizes")]
    models.save(lambda x, sizes: {"y": tf.math.segment_sum(x, tf.repeat(tf.range(tf.size(sizes)), sizes))}, *inputs)
    models.config(
        BATCHED
        + io("input", "x", [-1], more="allow_ragged_batch: true")
        + 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "sizes" data_type: TYPE_INT32 source_input: "x" }'
        + io("output", "y", [1], more="reshape { shape: [] }")
    )
    with serve(models.root) as server:
        found = server.infer("m", {"x": np.array([[1, 2, 3.5]], np.float32)}).outputs["y"]
    np.testing.assert_array_equal(found, np.array([[6.5]], np.float32))


SEQUENCE = """sequence_batching {
control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [1] } } """


def accumulating(models: Any) -> None:
    names = ("x", "start", "before")
    specs = [tf.TensorSpec([None, 1], tf.float32, name=name) for name in names]

    def add(x: Any, start: Any, before: Any) -> Any:
        total = x + (1 - start) * before
        return {"y": tf.identity(total), "after": tf.identity(total)}

    models.save(add, *specs)


def test_a_sequence_has_its_controls_and_its_state(models: Any) -> None:
    pytest.importorskip("headrace_sequence")
    accumulating(models)
    models.config(BATCHED + io("input", "x", [1]) + io("output", "y", [1]) + SEQUENCE)
    found = []
    with serve(models.root) as server:
        for number, last in ((1, False), (2, False), (4, True)):
            x = np.array([[number]], np.float32)
            answer = server.infer("m", {"x": x}, sequence_id=7, sequence_start=number == 1, sequence_end=last)
            found.append(float(np.asarray(answer.outputs["y"])[0, 0]))
    assert found == [1, 3, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("start", "begin"), "configuration specified sequence control 'begin', but model does not provide that input"),
        (("before", "x2"), "unexpected inference input 'x2', allowed inputs are: before, start, x"),
        (("TYPE_FP32 dims: [1] } }", "TYPE_INT32 dims: [1] } }"), "expects datatype TYPE_INT32 for input 'before'"),
    ],
)
def test_a_control_or_state_that_the_model_lacks_is_refused(models: Any, change: Any, message: str) -> None:
    pytest.importorskip("headrace_sequence")
    accumulating(models)
    models.config(BATCHED + io("input", "x", [1]) + io("output", "y", [1]) + SEQUENCE.replace(*change))
    assert message in models.reason()
