"""The code in docs/python-models.md and docs/pb-utils.md works as documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_python.testing import OpenModel

PAGE = Path(__file__).parents[3] / "docs" / "python-models.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page; each block stands below the line with its name."""
    for name, text in re.findall(
        r"^`([\w/.]+)`[^\n]*:\n\n```\w*\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_pages_test_passes_on_the_pages_model(folder: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV_"))}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_scale.py"]
    run = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environ, timeout=100)
    assert "2 passed" in run.stdout, run.stdout


def test_the_models_of_the_page_on_pb_utils_run(python_model: OpenModel) -> None:
    page = (PAGE.parent / "pb-utils.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "class TritonPythonModel" in block), names)
    x = np.ones((1, 3), np.float32)
    config = {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
              "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}], "max_batch_size": 8}  # fmt: skip
    assert python_model(names["TritonPythonModel"], config=config).infer({"x": x})["y"].tolist() == [[2, 2, 2]]
    exec(next(block for block in blocks if "def ask" in block), names)
    pb_utils, ask = names["pb_utils"], names["ask"]

    class Asks:
        def execute(self, requests: list[Any]) -> list[Any]:
            inputs = [pb_utils.get_input_tensor_by_name(request, "x") for request in requests]
            return [pb_utils.InferenceResponse([ask(given)]) for given in inputs]

    model = python_model(Asks, config=config, models={"scale": lambda inputs: {"y": inputs["x"] * 5}})
    assert model.infer({"x": x})["y"].tolist() == [[5, 5, 5]]
