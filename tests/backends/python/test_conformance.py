"""The published kit, for Python models in processes and in threads."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from headrace_testing import BackendConformance, Example, extreme_values

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
#: NumPy has no BF16, so BF16 is passed by DLPack.
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
        x = extreme_values(kind)
        return Example(directory, {"x": x}, {"y": x}, {"isolation": self.isolation})


class TestPythonInProcesses(Python):
    __test__ = True
    isolation = "process"


class TestPythonInThreads(Python):
    __test__ = True
    isolation = "thread"
