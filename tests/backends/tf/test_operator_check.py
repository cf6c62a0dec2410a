"""Graphs that would do more than compute are refused, also if they reach the operator indirectly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import HeadraceError
from headrace_testing.serving import on_loop, serve

tf = pytest.importorskip("tensorflow")

SPEC = tf.TensorSpec([None, 2], tf.float32, name="x")
GRAPH = """platform: "tensorflow_graphdef" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [2] } """


def placeholder() -> Any:
    return tf.compat.v1.placeholder(tf.float32, [None, 2], name="x")


def writing(target: Path) -> Callable[[Any], Any]:
    def write(x: Any) -> Any:
        tf.io.write_file(str(target), "by a model")
        return {"y": x + 1}

    return write


@pytest.mark.parametrize("trusted", [False, True])
def test_a_graph_that_writes_a_file_is_refused_unless_it_is_trusted(models: Any, tmp_path: Path, trusted: bool) -> None:
    target = tmp_path / "written"
    models.save(writing(target), SPEC)
    models.config(models.parameters(trust="true") if trusted else "")
    with serve(models.root, exit_on_error=False) as server:
        message = next(entry.reason for entry in server.index())
        if trusted:
            server.infer("m", {"x": np.zeros((1, 2), np.float32)})
    assert target.exists() == trusted
    assert ("'WriteFile'" in message and "it writes files" in message) != trusted


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_trust_that_is_sent_does_not_count(models: Any, tmp_path: Path, isolation: str) -> None:
    target = tmp_path / "written"
    models.save(writing(target), SPEC)
    sent = {key: {"string_value": value} for key, value in (("trust", "true"), ("isolation", isolation))}
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    config = {
        "platform": "tensorflow_savedmodel",
        "max_batch_size": 4,
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "parameters": sent,
    }
    refused = pytest.raises(HeadraceError, match="parameter 'trust' of model 'm' came with a load request")
    with serve(models.root, exit_on_error=False, model_control_mode="explicit") as server, refused:
        on_loop(server, asyncio.wait_for(server.load("m", {"config": json.dumps(config)}), 60))
    assert not target.exists()


@pytest.mark.parametrize(
    ("operator", "add"),
    [
        ("ReadFile", lambda x: tf.strings.length(tf.io.read_file("/etc/hostname"))),
        ("MatchingFiles", lambda x: tf.size(tf.io.matching_files("/etc/*"))),
        ("EagerPyFunc", lambda x: tf.py_function(lambda y: y, [x], tf.float32)),
        ("PyFunc", lambda x: tf.numpy_function(lambda y: y, [x], tf.float32)),
        ("PrintV2", lambda x: printed(x)),
        ("Abort", lambda x: ending(x)),
        (
            "ImmutableConst",
            lambda x: tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[4], memory_region_name="/etc/hostname"),
        ),
        ("TensorSliceDataset", lambda x: tf.data.Dataset.from_tensors(tf.constant(1.0)).reduce(0.0, lambda a, b: a)),
        ("WriteFile", lambda x: tf.cond(x[0, 0] > 0, lambda: hidden(x), lambda: x)),
        ("WriteFile", lambda x: tf.while_loop(lambda y: y[0, 0] < 1, hidden, [x], maximum_iterations=1)),
        ("WriteFile", lambda x: tf.map_fn(hidden, x)),
    ],
)
def test_operators_for_files_or_python_are_refused(models: Any, operator: str, add: Any) -> None:
    models.save(lambda x: {"y": x, "z": tf.reshape(tf.cast(add(x), tf.float32), [-1, 1])}, SPEC)
    message = models.reason()
    assert f"'{operator}'" in message or (operator == "TensorSliceDataset" and "Dataset'" in message), message


def printed(x: Any) -> Any:
    with tf.control_dependencies([tf.print(x, output_stream="file:///tmp/never")]):
        return tf.identity(x)


def mapped() -> Any:
    return tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[4], memory_region_name="/etc/hostname")


def ending(x: Any) -> Any:
    with tf.control_dependencies([tf.raw_ops.Abort(error_msg="by a model")]):
        return tf.identity(x)


def hidden(x: Any) -> Any:
    """Writes within a function that something calls."""
    with tf.control_dependencies([tf.io.write_file("/tmp/never", "x")]):
        return tf.identity(x)


def test_unused_operators_are_not_checked(models: Any) -> None:
    """Every SavedModel has the operators that saved it; and here is a signature that is not the one that is served."""
    models.save(lambda x: {"y": x}, SPEC, other=lambda x: {"y": hidden(x)})
    assert models.reason() == ""
    models.config(models.parameters(TF_SIGNATURE_DEF="other"))
    assert "'WriteFile'" in models.reason()


def test_an_operator_that_reads_does_not_run_while_shapes_are_inferred(models: Any, tmp_path: Path) -> None:
    """TensorFlow runs parts of a graph when it imports it: here it would read the file to compute a shape."""
    file = tmp_path / "shape"
    file.write_text("3")

    def build() -> None:
        size = tf.strings.to_number(tf.io.read_file(str(file)), tf.int32)
        tf.reshape(placeholder(), [-1, size], name="y")

    models.frozen(build)
    models.config(GRAPH)
    message = models.reason()
    assert "'ReadFile'" in message
    assert "complete shape" not in message


def test_an_operator_of_init_ops_is_checked(models: Any, tmp_path: Path) -> None:
    target = tmp_path / "written"

    def build() -> None:
        tf.identity(placeholder(), name="y")
        tf.io.write_file(str(target), "x", name="init")

    version = models.frozen(build)
    (version / "init.json").write_text('{"init_ops": ["init"]}')
    models.config(GRAPH + models.parameters(TF_INIT_OPS_FILE="init.json"))
    assert "'WriteFile'" in models.reason()
    assert not target.exists()


def test_a_function_by_the_name_of_an_operator_is_refused(models: Any) -> None:
    models.save(lambda x: {"y": tf.identity(x)}, SPEC)

    def rename(meta: Any) -> None:
        function = meta.graph_def.library.function.add()
        function.signature.name = "RestoreV2"

    models.edit(rename)
    assert "'RestoreV2'), and it is a function by the name of an operator" in models.reason()


# ---------------------------------------------------------------------- files that a model may read: its own


def vocabulary(models: Any, tmp_path: Path) -> None:
    """A SavedModel with a look-up of words in a table, which is read from an asset."""
    file = tmp_path / "words.txt"
    file.write_text("zero\none\ntwo\n")
    module = tf.Module()
    whole, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
    initializer = tf.lookup.TextFileInitializer(str(file), tf.string, whole, tf.int64, number)
    module.table = tf.lookup.StaticHashTable(initializer, -1)
    words = tf.TensorSpec([None, 1], tf.string, name="x")
    models.save(lambda x: {"y": module.table.lookup(x)}, words, module=module)
    file.unlink()


def add_text(meta: Any, name: str, text: str) -> str:
    node = meta.graph_def.node.add(name=name, op="Const")
    node.attr["dtype"].type = 7
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(text))
    return name


def initializer_call(meta: Any) -> Any:
    return next(node for node in meta.graph_def.node if "initializer" in node.attr["f"].func.name)


def initializer_of(meta: Any) -> Any:
    """Return the function that fills the table."""
    for function in meta.graph_def.library.function:
        for node in function.node_def:
            if node.op.startswith("InitializeTableFromTextFile"):
                return function, node
    raise AssertionError("no function fills a table")


def test_a_table_that_reads_another_file_is_refused(models: Any, tmp_path: Path) -> None:
    """The initializer gets the name of another file instead of the asset's."""
    vocabulary(models, tmp_path)

    def change(meta: Any) -> None:
        initializer_call(meta).input[0] = add_text(meta, "elsewhere", "/etc/hostname")

    models.edit(change)
    assert "'/etc/hostname', which is none of its assets" in models.reason()


def test_a_function_that_names_a_file_itself_is_refused(models: Any, tmp_path: Path) -> None:
    vocabulary(models, tmp_path)

    def change(meta: Any) -> None:
        function, reader = initializer_of(meta)
        node = function.node_def.add(name="elsewhere", op="Const")
        node.attr["dtype"].type = 7
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto("/etc/hostname"))
        reader.input[1] = "elsewhere:output:0"

    models.edit(change)
    assert "it reads files that are not the model's own" in models.reason()


@pytest.mark.parametrize("operator", ["For", "While", "StatelessWhile", "_If", "MapDefun", "BatchFunction"])
def test_a_function_that_reads_is_called_with_the_checked_value(models: Any, tmp_path: Path, operator: str) -> None:
    """The second call of a loop's function has other arguments, and other operators number arguments differently."""
    vocabulary(models, tmp_path)

    def change(meta: Any) -> None:
        initializer_call(meta).op = operator

    models.edit(change)
    assert "it reads files by a function that it may call more than once" in models.reason()


def test_a_function_that_reads_and_calls_itself_is_refused(models: Any, tmp_path: Path) -> None:
    vocabulary(models, tmp_path)

    def change(meta: Any) -> None:
        function, _ = initializer_of(meta)
        arguments = [each.name for each in function.signature.input_arg]
        function.node_def.add(name="again", op=function.signature.name, input=arguments)

    models.edit(change)
    assert "it calls itself, so that the files that it reads are unknown" in models.reason()


@pytest.mark.parametrize("how", ["api_implements", "gradient"])
def test_an_interchangeable_function_that_reads_is_refused(models: Any, tmp_path: Path, how: str) -> None:
    """TensorFlow chooses among functions that implement the same, and a function's gradient by another's name."""
    vocabulary(models, tmp_path)

    def change(meta: Any) -> None:
        function, _ = initializer_of(meta)
        other = meta.graph_def.library.function.add()
        other.CopyFrom(function)
        other.signature.name = "other"
        if how == "gradient":
            meta.graph_def.library.gradient.add(function_name=function.signature.name, gradient_func="other")
        else:
            other.attr["api_implements"].s = b"the same"

    models.edit(change)
    expected = "it reads files by a function that stands in for another" if how == "gradient" else "it reads files"
    assert expected in models.reason()


def test_variables_that_are_read_from_other_files_are_refused(models: Any) -> None:
    module = tf.Module()
    module.weights = tf.Variable([[1.0, 2.0]])
    models.save(lambda x: {"y": x * module.weights}, SPEC, module=module)

    def change(meta: Any) -> None:
        (restore,) = (node for node in meta.graph_def.node if node.name == meta.saver_def.restore_op_name)
        assert restore.op == "StatefulPartitionedCall"
        restore.input[0] = add_text(meta, "elsewhere", "/tmp/other/variables")

    models.edit(change)
    assert "it reads files other than the model's variables" in models.reason()


def test_variables_of_tensorflow_1_that_are_read_from_other_files_are_refused(models: Any) -> None:
    write_of_old(models)

    def change(meta: Any) -> None:
        elsewhere = add_text(meta, "elsewhere", "/tmp/other/variables")
        for node in meta.graph_def.node:
            if node.op == "RestoreV2":
                node.input[0] = elsewhere

    models.edit(change)
    assert "it reads files other than the model's variables" in models.reason()


def write_of_old(models: Any) -> None:
    """``y = x * v`` as TensorFlow 1 saves it."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = placeholder()
        y = x * v1.get_variable("v", initializer=[3.0, 4.0], use_resource=False)
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(models.root / "m/1/model.savedmodel"), {"x": x}, {"y": y})


@pytest.mark.parametrize("name", ["../../../../etc/hostname", "/etc/hostname", "a/../../x"])
def test_an_asset_elsewhere_is_refused(models: Any, tmp_path: Path, name: str) -> None:
    vocabulary(models, tmp_path)

    def change(meta: Any) -> None:
        meta.asset_file_def[0].filename = name

    models.edit(change)
    assert f"names the asset '{name}', which must stay in its directory 'assets'" in models.reason()


def test_a_graph_of_another_machine_does_not_load(models: Any) -> None:
    def build() -> None:
        tf.identity(placeholder(), name="y").op._set_device_from_string("/job:worker/task:7/device:CPU:0")

    models.frozen(build)
    models.config(GRAPH)
    assert "m/1/model.graphdef': " in models.reason()


def empty() -> Any:
    return tf.raw_ops.Empty(shape=[16384], dtype=tf.float32)


def temporary() -> Any:
    made = tf.raw_ops.TemporaryVariable(shape=[16384], dtype=tf.float32, var_name="made")
    return tf.raw_ops.DestroyTemporaryVariable(ref=made, var_name="made")


def without_values() -> Any:
    return tf.raw_ops.FakeParam(dtype=tf.float32, shape=[16384])


def triangle() -> Any:
    """The numbers above the diagonal, for a matrix that is not positive definite."""
    found = tf.raw_ops.Cholesky(input=tf.random.uniform([128, 128]) - 2.0)
    return tf.reshape(tf.linalg.band_part(found, 0, -1) - tf.linalg.band_part(found, 0, 0), [-1])


def vectors() -> Any:
    """Return the placeholder of eigenvectors that were not requested."""
    return tf.raw_ops.SelfAdjointEigV2(input=tf.random.uniform([64, 64]), compute_v=False)[1]


@pytest.mark.parametrize(
    ("operator", "make"),
    [
        ("Empty", empty),
        ("TemporaryVariable", temporary),
        ("FakeParam", without_values),
        ("Cholesky", triangle),
        ("SelfAdjointEigV2", vectors),
    ],
)
@pytest.mark.usefixtures("unwritten_byte")
def test_memory_that_an_operator_has_not_written_is_not_served(models: Any, operator: str, make: Any) -> None:
    def has_memory_of_others() -> bool:
        with tf.Graph().as_default() as graph:
            other = tf.compat.v1.placeholder(tf.float32, [16384])
            with tf.control_dependencies([tf.reduce_sum(other + other)]):
                run = tf.compat.v1.Session(graph=graph).make_callable(make(), [other])
        return bool(run(np.full(16384, 7.25, np.float32)).any())

    assert has_memory_of_others(), "the operator writes, and this test shows nothing"
    models.frozen(lambda: tf.add(placeholder(), tf.reshape(make(), [-1, 1])[:1], name="y"))
    models.config(GRAPH)
    assert f"operator '{operator}'" in (message := models.reason()), message
    assert "it returns memory that it has not written" in message
    models.config(GRAPH + models.parameters(trust="true"))
    assert models.reason() == ""


def test_memory_that_an_operator_fills_with_zeros_is_served(models: Any) -> None:
    def build() -> None:
        tf.add(placeholder(), tf.raw_ops.Empty(shape=[1, 2], dtype=tf.float32, init=True), name="y")

    models.frozen(build)
    models.config(GRAPH)
    assert models.reason() == ""


def test_rows_that_an_operator_has_no_input_for_are_not_served(models: Any) -> None:
    """The other rows are unwritten, as an allocator shows that fills new memory."""

    def build() -> None:
        row = tf.constant([[1.0, 2.0]])
        rows = tf.raw_ops.ParallelConcat(values=[row, row], shape=[4, 2])
        tf.add(placeholder(), rows[:1], name="y")

    models.frozen(build)
    models.config(GRAPH)
    assert "operator 'ParallelConcat'" in (message := models.reason()), message
    models.config(GRAPH + models.parameters(trust="true"))
    assert models.reason() == ""
