"""Executions, compared with TensorFlow called directly, and their effects on other work."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from headrace import BackendError, BytesTensor, Code
from headrace_testing.serving import serve
from headrace_tf import Parameters

tf = pytest.importorskip("tensorflow")

SPEC = tf.TensorSpec([None, 2], tf.float32, name="x")


def test_answers_are_those_of_tensorflow(models: Any) -> None:
    """Every operator of a small network, bit by bit or nearly."""
    rng = np.random.default_rng(4)
    filters, weights = rng.normal(size=(3, 3, 1, 4)), rng.normal(size=(64, 5))

    def network(x: Any) -> Any:
        maps = tf.nn.relu(tf.nn.conv2d(x, tf.constant(filters, tf.float32), 1, "SAME"))
        flat = tf.reshape(tf.nn.max_pool2d(maps, 2, 2, "SAME"), [-1, 64])
        scores = tf.nn.softmax(flat @ tf.constant(weights, tf.float32))
        return {"scores": scores, "best": tf.argmax(scores, axis=1)[:, None]}

    path = models.save(network, tf.TensorSpec([None, 8, 8, 1], tf.float32, name="x"))
    x = rng.normal(size=(6, 8, 8, 1)).astype(np.float32)
    expected = tf.saved_model.load(str(path / "model.savedmodel")).signatures["serving_default"](tf.constant(x))
    with models.loaded(models.model(path)) as (instance,):
        found = instance.execute({"x": x})
    np.testing.assert_allclose(found["scores"], expected["scores"].numpy(), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(found["best"], expected["best"].numpy())


def foreign(x: Any) -> Any:
    """Return a model with a Python function in it."""
    return {"y": tf.ensure_shape(tf.numpy_function(lambda y: y, [x], tf.float32), [None, 2])}


@pytest.mark.parametrize(
    ("parameters", "level", "anywhere"),
    [
        ({}, 0, True),
        ({}, -1, True),
        ({}, 1, False),
        ({"inter_threads": 2}, 0, False),
        ({"per_session_threads": True}, 0, False),
    ],
)
def test_an_execution_that_waits_for_threads_or_a_compiler_is_not_for_the_event_loop(
    models: Any, parameters: dict[str, Any], level: int, anywhere: bool
) -> None:
    config = f"optimization {{ graph {{ level: {level} }} }}"
    model = models.model(models.add(), config, Parameters(**parameters))
    ones = np.ones((2, 16), np.float32)
    with models.loaded(model) as (instance,):
        assert instance.any_thread == anywhere
        np.testing.assert_array_equal(instance.execute({"A": ones, "B": ones})["S"], 2 * ones)


def endless(x: Any) -> Any:
    return {
        "y": tf.while_loop(lambda y: tf.reduce_sum(y) < 1, lambda y: (y * 2,), (x,), shape_invariants=(x.shape,))[0]
    }


def endless_in_a_branch(x: Any) -> Any:
    return {"y": tf.cond(tf.reduce_sum(x) > 0, lambda: endless(x)["y"], lambda: x)}


@pytest.mark.parametrize("network", [endless, endless_in_a_branch])
def test_a_model_that_may_never_end_does_not_run_on_the_event_loop(models: Any, network: Any) -> None:
    with models.loaded(models.model(models.save(network, SPEC))) as (instance,):
        assert not instance.any_thread
        np.testing.assert_array_equal(instance.execute({"x": np.full((1, 2), 0.25, np.float32)})["y"], [[0.5, 0.5]])


def test_operators_run_on_the_calling_thread_by_default(models: Any) -> None:
    """A Python function in the graph reports the thread that runs the operator."""
    path = models.save(foreign, SPEC)
    seen: list[int] = []

    def note(x: Any) -> Any:
        seen.append(threading.get_ident())
        return x

    def change(meta: Any) -> None:
        token = tf.Graph()
        with token.as_default():
            operation = tf.numpy_function(note, [tf.constant(0.0)], tf.float32).op
        for function in meta.graph_def.library.function:
            for node in function.node_def:
                if node.op == "PyFunc":
                    node.attr["token"].s = operation.get_attr("token")
        tokens.append(token)

    tokens: list[Any] = []
    models.edit(change)
    model = models.model(path, parameters=Parameters(trust=True))
    with models.loaded(model) as (instance,):
        instance.execute({"x": np.zeros((1, 2), np.float32)})
    assert seen == [threading.get_ident()]


def test_the_interpreter_is_free_while_tensorflow_computes(models: Any) -> None:
    path = models.save(lambda x: {"y": tf.linalg.matmul(x, x)}, tf.TensorSpec([1200, 1200], tf.float32, name="x"))
    x = np.ones((1200, 1200), np.float32)
    with models.loaded(models.model(path)) as (instance,):
        instance.execute({"x": x})
        done = threading.Event()

        def run() -> None:
            for _ in range(3):
                instance.execute({"x": x})
            done.set()

        thread = threading.Thread(target=run)
        thread.start()
        turns, longest, last = 0, 0.0, time.monotonic()
        while not done.is_set():
            now = time.monotonic()
            turns, longest, last = turns + 1, max(longest, now - last), now
        thread.join()
    assert turns > 100


def test_the_error_of_a_request_names_the_operator_and_the_next_is_answered(models: Any) -> None:
    def check(x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(x, 10.0, message="x is too large")]):
            row = tf.identity(x)
        return {"y": tf.gather(row, tf.cast(row[0, 0], tf.int32), axis=0)[None] + 0 * row}

    models.save(check, SPEC)
    with serve(models.root) as server:
        for value, message in ((20.0, "x is too large"), (5.0, "is not in [0, 1)")):
            with pytest.raises(BackendError) as caught:
                server.infer("m", {"x": np.full((1, 2), value, np.float32)})
            assert message in caught.value.message
            assert "\n" not in caught.value.message
            assert caught.value.code is Code.INTERNAL
        zero = np.zeros((1, 2), np.float32)
        np.testing.assert_array_equal(server.infer("m", {"x": zero}).outputs["y"], zero)


def test_a_python_function_that_this_process_does_not_have_fails_its_request(models: Any) -> None:
    """Trusted, and saved by another program."""
    models.save(foreign, SPEC)

    def change(meta: Any) -> None:
        for function in meta.graph_def.library.function:
            for node in function.node_def:
                if node.op == "PyFunc":
                    node.attr["token"].s = b"pyfunc_of_another_program"

    models.edit(change)
    models.config(models.parameters(trust="true"))
    with serve(models.root) as server, pytest.raises(BackendError, match="pyfunc_of_another_program"):
        server.infer("m", {"x": np.zeros((1, 2), np.float32)})


def test_a_graph_prints_to_stdout_and_answers_the_caller(models: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def printing(x: Any) -> Any:
        with tf.control_dependencies([tf.print("printed:", x[0, 0], output_stream=sys.stdout)]):
            return {"y": tf.identity(x)}

    models.save(printing, SPEC)
    x = np.full((1, 2), 7, np.float32)
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": x}).outputs["y"], x)
    assert "printed: 7" in capfd.readouterr().out


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_tensors_without_elements_pass(models: Any, shape: tuple[int, int]) -> None:
    specs = [tf.TensorSpec([None, None], tf.float32, name="x"), tf.TensorSpec([None, None], tf.string, name="s")]
    path = models.save(lambda x, s: {"y": x + 1, "t": tf.strings.join([s, s])}, *specs)
    with models.loaded(models.model(path)) as (instance,):
        found = instance.execute({"x": np.zeros(shape, np.float32), "s": BytesTensor.from_items([], shape)})
    assert found["y"].shape == found["t"].shape == shape


def test_strings_are_bytes_of_any_kind(models: Any) -> None:
    path = models.save(lambda x: {"y": tf.strings.join([x, "!"])}, tf.TensorSpec([None], tf.string, name="x"))
    strings = [b"", b"a\0b", b"\xff\xfe", "naïve 🚰".encode(), b"x" * 70_000]
    with models.loaded(models.model(path)) as (instance,):
        found = instance.execute({"x": BytesTensor.from_items(strings, (5,))})["y"]
    assert list(found) == [each + b"!" for each in strings]


def test_a_result_outlives_its_session(models: Any) -> None:
    path = models.add()
    a, b = np.random.default_rng(8).normal(size=(2, 4, 16)).astype(np.float32)
    with models.loaded(models.model(path)) as (instance,):
        result = instance.execute({"A": a, "B": b})["S"]
    np.testing.assert_array_equal(result, a + b)
