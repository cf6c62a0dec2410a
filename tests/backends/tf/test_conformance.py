"""The published kit, with arithmetic as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_testing import BackendConformance, Example, extreme_values

tf = pytest.importorskip("tensorflow")


class TestSavedModel(BackendConformance):
    plugin, backend, heavy = "headrace_tf", "tensorflow", ("tensorflow",)
    #: Memory does not grow in 300 reloads, except at first: allocators keep more in a process that has run other tests.
    reload_growth_bytes = 24 << 20

    @pytest.fixture
    def example(self, models: Any) -> Example:
        a, b = np.random.default_rng(7).normal(size=(2, 5, 16)).astype(np.float32)
        damage = "model.savedmodel/saved_model.pb"
        return Example(models.add(), {"A": a, "B": b}, {"S": a + b, "D": a - b}, damage=damage)

    def example_of(self, kind: str, directory: Path) -> Example | None:
        """``y = x`` by a Reshape, which supports every type."""
        x = extreme_values(kind)
        dtype = tf.string if kind == "BYTES" else tf.dtypes.as_dtype(x.dtype)
        shape = [None, *x.shape[1:]]
        module = tf.Module()
        module.function = tf.function(
            lambda x: {"y": tf.reshape(x, tf.shape(x))}, input_signature=[tf.TensorSpec(shape, dtype, name="x")]
        )
        tf.saved_model.save(module, str(directory / "model.savedmodel"), signatures=module.function)
        return Example(directory, {"x": x}, {"y": x})


class TestFrozenGraph(BackendConformance):
    """The kit for frozen graphs, whose inputs and outputs are in the config."""

    reload_growth_bytes = TestSavedModel.reload_growth_bytes

    plugin, backend, heavy = "headrace_tf", "tensorflow", ("tensorflow",)
    platform = 'platform: "tensorflow_graphdef"'

    @pytest.fixture
    def example(self, models: Any) -> Example:
        def build() -> None:
            a, b = (tf.compat.v1.placeholder(tf.float32, [None, 16], name=name) for name in "AB")
            tf.add(a, b, name="S")
            tf.subtract(a, b, name="D")

        a, b = np.random.default_rng(7).normal(size=(2, 5, 16)).astype(np.float32)
        outputs = {"S": a + b, "D": a - b}
        return Example(models.frozen(build), {"A": a, "B": b}, outputs, damage="model.graphdef", config=self.platform)

    def example_of(self, kind: str, directory: Path) -> Example | None:
        """``y = x`` by way of a Reshape."""
        x = extreme_values(kind)
        with tf.Graph().as_default() as graph:
            dtype = tf.string if kind == "BYTES" else tf.dtypes.as_dtype(x.dtype)
            placeholder = tf.compat.v1.placeholder(dtype, [None, *x.shape[1:]], name="x")
            tf.reshape(placeholder, tf.shape(placeholder), name="y")
        (directory / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())
        return Example(directory, {"x": x}, {"y": x}, config=self.platform)
