"""The published kit, with arithmetic as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from headrace.testing import BackendConformance, Example

tf = pytest.importorskip("tensorflow")


class TestTensorFlow(BackendConformance):
    plugin, backend, heavy = "headrace_tf", "tensorflow", ("tensorflow",)

    @pytest.fixture
    def example(self, models: Any) -> Example:
        a, b = np.random.default_rng(7).normal(size=(2, 5, 16)).astype(np.float32)
        damage = "model.savedmodel/saved_model.pb"
        return Example(models.add(), {"A": a, "B": b}, {"S": a + b, "D": a - b}, damage=damage)

    def example_of(self, kind: str, directory: Path) -> Example | None:
        """``y = x`` by way of a Reshape, which knows every type."""
        x = values_of(kind)
        dtype = tf.string if kind == "BYTES" else tf.dtypes.as_dtype(x.dtype)
        shape = [None, *x.shape[1:]]
        module = tf.Module()
        module.function = tf.function(
            lambda x: {"y": tf.reshape(x, tf.shape(x))}, input_signature=[tf.TensorSpec(shape, dtype, name="x")]
        )
        tf.saved_model.save(module, str(directory / "model.savedmodel"), signatures=module.function)
        return Example(directory, {"x": x}, {"y": x})


def values_of(kind: str) -> np.ndarray[Any, Any]:
    """Three rows of ``kind`` with its extreme values; one value per row for ``SCALAR``."""
    if kind == "BYTES":
        return np.array([["", "naïve"], ["a\0b", "🚰"], ["x" * 300, "y"]], dtype=object)
    if kind == "BOOL":
        return np.array([[True, False], [False, True], [True, True]])
    if kind == "SCALAR":
        return np.array([1.5, -2.5, 0], np.float32)
    if kind in ("FP16", "FP32", "FP64", "BF16"):
        dtype = {"BF16": ml_dtypes.bfloat16}.get(kind) or np.dtype(f"f{int(kind[2:]) // 8}")
        return np.array([[1.5, -2.5], [0, 6e4], [-6e-5, 1]]).astype(dtype)
    limits = np.iinfo(kind.lower())
    return np.array([[limits.min, limits.max], [0, 1], [2, 3]], dtype=kind.lower())
