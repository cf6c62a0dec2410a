"""A real Triton's answers to a series of loads and unloads, recorded in ``triton_control.json``.

As in ``test_triton.py``, a question that is answered otherwise here carries its ``deviation``. The
questions are asked in order, of one server; the word BACKEND in them stands for its backend. An
index is asked for until nothing is loading or unloading.

To record anew: ``python tests/protocol/test_triton_control.py DIRECTORY`` writes the repository,
``tritonserver --model-repository=DIRECTORY --model-control-mode=explicit --load-model=plain`` serves
it, and ``python tests/protocol/test_triton_control.py PORT`` asks.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conftest import Headrace

RECORD = Path(__file__).with_name("triton_control.json")
QUESTIONS: list[dict[str, Any]] = json.loads(RECORD.read_text())
CONFIG = """
backend: "BACKEND" max_batch_size: 64
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "INPUT0") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each.as_numpy())]) for each in tensors]
"""


def write_repository(root: Path, backend: str) -> None:
    """Models that load, and models that cannot."""
    models = {
        "plain": (CONFIG, [1]),
        "two": (CONFIG + "version_policy { all { } }", [1, 3]),
        "broken": (CONFIG.replace("FP32", "FP99"), [1]),
        "misnamed": (CONFIG + 'name: "other"', [1]),
        "versionless": (CONFIG, []),
    }
    for name, (config, versions) in models.items():
        (root / name).mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config.replace("BACKEND", backend))
        for version in versions:
            (root / name / str(version)).mkdir()
            (root / name / str(version) / "model.py").write_text(MODEL)


def ask(port: int, backend: str, question: dict[str, Any]) -> tuple[int, str]:
    """Status and body."""
    end = time.monotonic() + 30
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            body = question["body"]
            connection.request(question["method"], question["path"], body and body.replace("BACKEND", backend))
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if not question["path"].endswith("/index") or "LOADING" not in text:
            return response.status, text
        assert time.monotonic() < end, text


def test_headrace_controls_models_as_triton_does_or_has_a_reason(
    serve: Callable[..., Headrace], tmp_path: Path
) -> None:
    write_repository(tmp_path / "models", "identity")
    server = serve(f"--model-repository={tmp_path / 'models'}", "--model-control-mode=explicit", "--load-model=plain")
    wrong = []
    for question in QUESTIONS:
        status, body = ask(server.http, "identity", question)
        is_same = (status, body) == (question["status"], question["answer"])
        if is_same is ("deviation" in question):
            wrong.append(f"{question}\n    is answered {status} {body}")
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    if not sys.argv[1].isdigit():
        write_repository(Path(sys.argv[1]), "python")
    else:
        for question in QUESTIONS:
            question["status"], question["answer"] = ask(int(sys.argv[1]), "python", question)
        RECORD.write_text("".join(("[\n", ",\n".join(map(json.dumps, QUESTIONS)), "\n]\n")))
