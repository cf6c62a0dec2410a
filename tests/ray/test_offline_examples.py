"""The examples of docs/offline-batches.md with pandas and with Ray Data, as they are written there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

pandas = pytest.importorskip("pandas", reason="session ray has it")
pytest.importorskip("ray", reason="session ray has it")

ROOT = Path(__file__).parents[2]
PANDAS, RAY = re.findall(r"```python\n(.*?)```", (ROOT / "docs/offline-batches.md").read_text(), re.DOTALL)
IMAGES = np.random.default_rng(1).integers(0, 17, (1000, 8, 8)).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    images = [image.ravel() for image in IMAGES]
    pandas.DataFrame({"image": images, "id": range(1000)}).to_parquet(tmp_path / "in.parquet")
    return tmp_path


def run(script: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected(images: Any) -> Any:
    session = onnxruntime.InferenceSession(ROOT / "examples/models/digits/1/model.onnx")
    return session.run(["probabilities"], {"image": images})[0]


def test_a_frame_of_pandas_gets_a_column(folder: Path) -> None:
    stdout = run(f"{PANDAS}\nprint(frame['digit'].tolist())", folder)
    assert stdout.splitlines()[-1] == str(expected(np.zeros((3, 8, 8), np.uint8)).argmax(1).tolist())


def test_ray_data_infers_each_row_once(folder: Path) -> None:
    run(RAY, folder)
    frame = pandas.read_parquet(folder / "out").sort_values("id")
    assert frame["id"].tolist() == list(range(1000))
    np.testing.assert_allclose(np.stack(frame["probabilities"]), expected(IMAGES), rtol=1e-5, atol=1e-6)
