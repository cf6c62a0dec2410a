"""The published kit, for Python models in processes and in threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from headrace.testing import BackendConformance, Example

ADD_SUB = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "AB"]
            tensors = [pb_utils.Tensor("S", a + b), pb_utils.Tensor("D", a - b)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
#: NumPy has no BF16, so that one goes by way of DLPack.
SAME = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.same(request.inputs()[0])]) for request in requests]

    def same(self, x):
        return pb_utils.Tensor.from_dlpack("y", x) if x.triton_dtype() == 14 else pb_utils.Tensor("y", x.as_numpy())
"""


class Python(BackendConformance):
    __test__ = False
    plugin, backend, heavy = "headrace_python.plugin", "python", ()
    isolation: ClassVar[str]

    @pytest.fixture
    def example(self, tmp_path: Path) -> Example:
        (tmp_path / "model.py").write_text(ADD_SUB)
        a, b = np.random.default_rng(7).normal(size=(2, 5, 16)).astype(np.float32)
        parameters = {"isolation": self.isolation}
        return Example(tmp_path, {"A": a, "B": b}, {"S": a + b, "D": a - b}, parameters, damage="model.py")

    def example_of(self, kind: str, directory: Path) -> Example | None:
        (directory / "model.py").write_text(SAME)
        x = values_of(kind)
        return Example(directory, {"x": x}, {"y": x}, {"isolation": self.isolation})


class TestPythonInProcesses(Python):
    __test__ = True
    isolation = "process"


class TestPythonInThreads(Python):
    __test__ = True
    isolation = "thread"


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
