"""``headrace serve --dev``: save a model and ask it again, or stop inside it."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

CONFIG = """
backend: "python" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [-1] } output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        STATEMENT
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)])
"""


def save(root: Path, statement: str, name: str = "m") -> Path:
    """Write the model, as an editor would; returns its file."""
    file = root / name / "1" / "model.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(CONFIG)
    file.write_text(MODEL.replace("STATEMENT", statement))
    return file


def ask(server: Headrace, name: str = "m") -> Any:
    """Return the model's answer to 1 and 2; None if it is not served."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=40)
    try:
        tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
        connection.request("POST", f"/v2/models/{name}/infer", json.dumps({"inputs": [tensor]}))
        answer = json.loads(connection.getresponse().read())
        return answer["outputs"][0]["data"] if "outputs" in answer else None
    finally:
        connection.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


def test_a_saved_model_is_served_and_one_that_cannot_be_loaded_is_not(
    serve: Callable[..., Headrace], root: Path, wait_until: Callable[..., None]
) -> None:
    save(root, "values = values + 1")
    server = serve(f"--model-repository={root}", "--dev")
    assert ask(server) == [2.0, 3.0]
    save(root, "values = values * 10")
    wait_until(lambda: ask(server) == [10.0, 20.0], "the saved model answers")
    file = save(root, "values = (")
    server.wait_for_line(r"failed to load 'm' version 1")
    assert ask(server) == [10.0, 20.0]
    line = file.read_text().split("values = (")[0].count("\n") + 1
    assert f"model.py, line {line}" in server.log
    save(root, "values = values - 1")
    wait_until(lambda: ask(server) == [0.0, 1.0], "the mended model answers")
    save(root, "pass", "new")
    wait_until(lambda: ask(server, "new") == [1.0, 2.0], "the new model answers")
    shutil.rmtree(root / "m")
    wait_until(lambda: ask(server) is None, "the deleted model is gone")
    wait_until(lambda: server.get("/v2/health/ready")[0] == 200, "what is left is ready")


def test_a_breakpoint_stops_only_its_own_model(serve: Callable[..., Headrace], root: Path) -> None:
    save(root, "breakpoint()")
    save(root, "values = values + 1", "other")
    server = serve(f"--model-repository={root}", "--dev", interactive=True)
    answers: list[Any] = []
    caller = threading.Thread(target=lambda: answers.append(ask(server)))
    caller.start()
    server.wait_for_prompt("(Pdb) ")
    assert ask(server, "other") == [2.0, 3.0]
    server.type("values = values * 7")
    server.wait_for_prompt("(Pdb) ")
    server.type("c")
    caller.join(40)
    assert answers == [[7.0, 14.0]]


def test_a_configured_isolation_takes_precedence_over_dev(serve: Callable[..., Headrace], root: Path) -> None:
    save(root, "import os; values = values * 0 + os.getpid()")
    in_thread = serve(f"--model-repository={root}", "--dev")
    assert ask(in_thread) == [in_thread.process.pid] * 2
    in_process = serve(f"--model-repository={root}", "--dev", "--backend-config=python,isolation=process")
    assert ask(in_process) not in (None, [in_process.process.pid] * 2)
