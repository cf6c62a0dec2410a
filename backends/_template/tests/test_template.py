from pathlib import Path

import numpy as np
import pytest

from headrace_testing import BackendConformance, Example


class TestTemplate(BackendConformance):
    plugin, backend, heavy = "headrace_template", "template", ()  # heavy: the modules of your engine

    @pytest.fixture
    def example(self, tmp_path: Path) -> Example:
        return self.example_of("FP32", tmp_path)

    def example_of(self, kind: str, directory: Path) -> Example:
        weights = np.arange(3 if kind == "SCALAR" else 12, dtype=np.float32).reshape(-1, 3)
        np.save(directory / "weights.npy", weights)
        rows = np.eye(len(weights), dtype=np.float32)
        return Example(directory, {"features": rows}, {"scores": 2 * weights}, {"scale": "2.0"}, damage="weights.npy")
