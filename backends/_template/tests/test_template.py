from pathlib import Path

import numpy as np
import pytest

from penstock.testing import BackendConformance, Example


class TestTemplate(BackendConformance):
    plugin, backend, heavy = "penstock_template", "template", ()

    @pytest.fixture
    def example(self, tmp_path: Path) -> Example:
        weights = np.arange(12, dtype=np.float32).reshape(4, 3)
        np.save(tmp_path / "weights.npy", weights)
        rows = np.eye(4, dtype=np.float32)
        return Example(tmp_path, {"features": rows}, {"scores": 2 * weights}, {"scale": "2.0"}, damage="weights.npy")
