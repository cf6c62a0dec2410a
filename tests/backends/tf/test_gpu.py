"""Tests that need a GPU for TensorFlow. They have not run yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Device
from headrace_tf import TensorFlow
from headrace_tf.tensorflow_process import load_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not load_engine().config.list_physical_devices("GPU"), reason="this TensorFlow sees no GPU"),
]


@contextmanager
def on_gpu(models: Any, path: Path, config: str = "") -> Iterator[Any]:
    backend = TensorFlow({})
    model = models.model(path, "instance_group { kind: KIND_GPU } " + config, device=Device("gpu", 0))
    instance = backend.load(replace(model, shared=backend.share(model), instance_name="m_0"))
    try:
        yield instance
    finally:
        instance.close()


def pair() -> Any:
    return np.random.default_rng(11).normal(size=(2, 3, 16)).astype(np.float32)


def test_answers_on_the_gpu_are_those_of_arithmetic(models: Any) -> None:
    a, b = pair()
    with on_gpu(models, models.add()) as instance:
        outputs = instance.execute({"A": a, "B": b})
    np.testing.assert_array_equal(outputs["S"], a + b)
    np.testing.assert_array_equal(outputs["D"], a - b)


def test_operators_are_placed_on_the_gpu(models: Any) -> None:
    with on_gpu(models, models.add()) as instance:
        operations = instance._opened.session.graph.get_operations()
    assert {each.device for each in operations} == {"/device:GPU:0"}


def test_an_instance_on_a_gpu_is_not_for_the_event_loop(models: Any) -> None:
    with on_gpu(models, models.add()) as instance:
        assert not instance.any_thread


def test_a_kept_answer_survives_the_next_run(models: Any) -> None:
    a, b = pair()
    with on_gpu(models, models.add()) as instance:
        result = instance.execute({"A": a, "B": b})["S"]
        instance.execute({"A": b, "B": b})
    np.testing.assert_array_equal(result, a + b)


@pytest.mark.parametrize("accelerator", ["auto_mixed_precision", "gpu_io"])
def test_an_accelerated_matrix_product_is_nearly_that_of_arithmetic(models: Any, accelerator: str) -> None:
    tf = load_engine()
    weights = np.random.default_rng(2).normal(size=(16, 8)).astype(np.float32)
    spec = tf.TensorSpec([None, 16], tf.float32, name="x")
    path = models.save(lambda x: {"y": x @ tf.constant(weights)}, spec)
    listed = f'gpu_execution_accelerator {{ name: "{accelerator}" }}'
    (a, _) = pair()
    with on_gpu(models, path, f"optimization {{ execution_accelerators {{ {listed} }} }}") as instance:
        found = instance.execute({"x": a})["y"]
    np.testing.assert_allclose(found, a @ weights, rtol=2e-2, atol=2e-2)
