"""The first steps of a new deployment, short enough for every version of Python: session `smoke` of the noxfile."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http

import headrace
import headrace_engines
import headrace_grpc
import headrace_http
import headrace_onnx
import headrace_python

if TYPE_CHECKING:
    from tests.conftest import Headrace

EXAMPLES = Path(__file__).parents[2] / "examples"
DOUBLE = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2)]) for x in inputs]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Headrace]) -> Headrace:
    """A server with the example's ONNX model and a model in Python."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(EXAMPLES / "models/digits", folder / "digits")
    (folder / "double/1").mkdir(parents=True)
    (folder / "double/config.pbtxt").write_text(DOUBLE)
    (folder / "double/1/model.py").write_text(MODEL)
    return keep_serving(f"--model-repository={folder}")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_stock_client_gets_what_both_models_compute(server: Headrace, protocol: str) -> None:
    client_module, port = (http, server.http) if protocol == "http" else (grpc, server.grpc)
    x = np.array([1, 2, 3], np.float32)
    blank = np.zeros((1, 8, 8), np.uint8)
    with client_module.InferenceServerClient(f"127.0.0.1:{port}") as client:

        def infer(model: str, name: str, value: np.ndarray, datatype: str) -> http.InferResult:
            tensor = client_module.InferInput(name, list(value.shape), datatype)
            tensor.set_data_from_numpy(value)
            return client.infer(model, [tensor])

        assert infer("double", "x", x, "FP32").as_numpy("y").tolist() == [2, 4, 6]
        probabilities = infer("digits", "image", blank, "UINT8").as_numpy("probabilities")
    assert probabilities.shape == (1, 10)
    assert probabilities.sum() == pytest.approx(1, abs=1e-3)


PACKAGES = [headrace, headrace_engines, headrace_grpc, headrace_http, headrace_onnx, headrace_python]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_module_can_be_imported(package: object) -> None:
    """A module that only some deployments import may fail as any other; one may need what an extra brings."""
    path, name = package.__path__, package.__name__  # type: ignore[attr-defined]
    failed = []
    for module in pkgutil.walk_packages(path, f"{name}."):
        if module.name.endswith(".__main__"):
            continue  # a program, which would run
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as missing:
            if (missing.name or "").startswith("headrace"):
                failed.append(f"{module.name}: {missing}")
    assert failed == []
