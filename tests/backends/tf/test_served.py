"""TensorFlow models behind a server: no config, variables, tables, frozen graphs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import BytesTensor, Server
from headrace.testing.serving import serve

tf = pytest.importorskip("tensorflow")

GRAPH = """platform: "tensorflow_graphdef" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [2] }"""


def reason(server: Server, name: str) -> str:
    return next(entry.reason for entry in server.index() if entry.name == name)


def doubled() -> None:
    x = tf.compat.v1.placeholder(tf.float32, [None, 2], name="x")
    tf.multiply(x, 2.0, name="y")


def test_a_saved_model_without_a_config_is_served(models: Any) -> None:
    models.add()
    a, b = np.random.default_rng(1).normal(size=(2, 3, 16)).astype(np.float32)
    with serve(models.root) as server:
        outputs = server.infer("m", {"A": a, "B": b}).outputs
        config = server.resolve("m").config
    np.testing.assert_array_equal(outputs["S"], a + b)
    np.testing.assert_array_equal(outputs["D"], a - b)
    assert (config.platform, config.max_batch_size) == ("tensorflow_savedmodel", 4)


def test_variables_are_restored(models: Any) -> None:
    module = tf.Module()
    module.weights = tf.Variable(np.arange(6, dtype=np.float32).reshape(2, 3))
    spec = tf.TensorSpec([None, 2], tf.float32, name="x")
    models.save(lambda x: {"y": x @ module.weights}, spec, module=module)
    with serve(models.root) as server:
        y = server.infer("m", {"x": np.eye(2, dtype=np.float32)}).outputs["y"]
    np.testing.assert_array_equal(y, np.arange(6).reshape(2, 3))


def vocabulary(models: Any, tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("zero\none\ntwo\n")
    module = tf.Module()
    whole, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
    initializer = tf.lookup.TextFileInitializer(str(file), tf.string, whole, tf.int64, number)
    module.table = tf.lookup.StaticHashTable(initializer, -1)
    spec = tf.TensorSpec([None, 1], tf.string, name="x")
    models.save(lambda x: {"y": module.table.lookup(x)}, spec, module=module)
    file.unlink()


def test_a_table_is_filled_from_the_models_own_file(models: Any, tmp_path: Path) -> None:
    vocabulary(models, tmp_path)
    with serve(models.root) as server:
        found = server.infer("m", {"x": BytesTensor.from_items([b"two", b"none"], (2, 1))}).outputs["y"]
    np.testing.assert_array_equal(found, [[2], [-1]])


def test_a_frozen_graph_is_served_by_the_names_of_its_nodes(models: Any) -> None:
    models.frozen(doubled)
    models.config(GRAPH)
    with serve(models.root) as server:
        y = server.infer("m", {"x": np.array([[1, 2]], np.float32)}).outputs["y"]
    np.testing.assert_array_equal(y, [[2, 4]])


@pytest.mark.parametrize("trusted", [False, True])
def test_a_graph_that_writes_a_file_is_refused_unless_it_is_trusted(models: Any, tmp_path: Path, trusted: bool) -> None:
    target = tmp_path / "written"

    def write(x: Any) -> Any:
        tf.io.write_file(str(target), "by a model")
        return {"y": x + 1}

    models.save(write, tf.TensorSpec([None, 2], tf.float32, name="x"))
    models.config(models.trust() if trusted else "")
    with serve(models.root, exit_on_error=False) as server:
        said = reason(server, "m")
        if trusted:
            server.infer("m", {"x": np.zeros((1, 2), np.float32)})
    assert target.exists() == trusted
    assert ("'WriteFile'" in said and "it writes files" in said) != trusted


@pytest.mark.parametrize(
    ("operator", "add"),
    [
        ("ReadFile", lambda x: tf.strings.length(tf.io.read_file("/etc/hostname"))),
        ("EagerPyFunc", lambda x: tf.py_function(lambda y: y, [x], tf.float32)),
        ("PyFunc", lambda x: tf.numpy_function(lambda y: y, [x], tf.float32)),
    ],
)
def test_what_reads_files_or_runs_python_is_refused(models: Any, operator: str, add: Any) -> None:
    models.save(lambda x: {"y": x, "z": tf.reshape(add(x), [-1, 1])}, tf.TensorSpec([None, 2], tf.float32, name="x"))
    with serve(models.root, exit_on_error=False) as server:
        assert f"'{operator}'" in reason(server, "m")


def test_a_table_that_reads_another_file_is_refused(models: Any, tmp_path: Path) -> None:
    """The file's initializer is given the name of a file elsewhere instead of the asset's."""
    vocabulary(models, tmp_path)
    from tensorflow.core.protobuf import saved_model_pb2

    file = models.root / "m/1/model.savedmodel/saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    meta = saved.meta_graphs[0]
    elsewhere = meta.graph_def.node.add(name="elsewhere", op="Const")
    elsewhere.attr["dtype"].type = 7
    elsewhere.attr["value"].tensor.CopyFrom(tf.make_tensor_proto("/etc/hostname"))
    initializer = next(node for node in meta.graph_def.node if "initializer" in node.attr["f"].func.name)
    initializer.input[0] = "elsewhere"
    file.write_bytes(saved.SerializeToString())
    with serve(models.root, exit_on_error=False) as server:
        assert "'/etc/hostname', which is none of its assets" in reason(server, "m")


def test_a_signature_that_is_not_there_is_told_with_those_that_are(models: Any) -> None:
    models.add()
    models.config('parameters { key: "TF_SIGNATURE_DEF" value { string_value: "other" } }')
    with serve(models.root, exit_on_error=False) as server:
        assert "expected 'other' signature; it has: serving_default" in reason(server, "m")


def test_libraries_of_operators_are_refused_by_name(models: Any) -> None:
    models.add()
    io = "data_type: TYPE_FP32 dims: [16]"
    names = "".join(f'input {{ name: "{name}" {io} }}' for name in "AB") + f'output {{ name: "S" {io} }}'
    library = 'model_operations { op_library_filename: "libmine.so" }'
    models.config(f'backend: "tensorflow" max_batch_size: 4 {names} {library}')
    with serve(models.root, exit_on_error=False) as server:
        assert "'libmine.so'" in reason(server, "m")
