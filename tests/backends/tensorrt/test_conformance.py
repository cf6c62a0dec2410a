"""The published kit with the recorded fake: failures are of the backend, not of TensorRT."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headrace_testing import BackendConformance, Example, extreme_values

ELEMENTS = {"FP32": "FLOAT", "FP16": "HALF", "SCALAR": "FLOAT"}
_GROUP = "instance_group { kind: KIND_GPU gpus: 0 }"


@pytest.mark.usefixtures("two_gpus")
class TestTensorRT(BackendConformance):
    plugin, backend, heavy = "headrace_tensorrt", "tensorrt", ("tensorrt", "tensorrt_bindings")
    zero_rows = False  # the least that a plan takes is one row
    thread_bound = True  # which device a thread uses is CUDA's state of that thread

    @pytest.fixture
    def example(self, plans: Any) -> Example:
        rng = np.random.default_rng(7)
        a, b = rng.normal(size=(2, 5, 16)).astype(np.float32)
        return Example(plans.add(), {"A": a, "B": b}, {"S": a + b, "D": a - b}, damage="model.plan", config=_GROUP)

    @pytest.fixture(autouse=True)
    def _give_plans(self, plans: Any, recorded: ModuleType) -> None:
        self._plans = plans

    def example_of(self, kind: str, directory: Path) -> Example | None:
        """``y = x``."""
        x = extreme_values(kind)
        path = self._plans.copy(ELEMENTS.get(kind, kind), (-1, *x.shape[1:]), name=kind.lower())
        return Example(path, {"x": x}, {"y": x}, config=_GROUP)
