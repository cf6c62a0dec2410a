"""Which of several mistakes in one request a real Triton names, recorded in ``triton_refusals.json``.

As in ``test_triton.py``, a question that is answered otherwise here carries its ``deviation``.

To record anew: ``python -m tests.protocol.test_triton_refusals DIRECTORY`` writes the repository,
``tritonserver --model-repository=DIRECTORY`` serves it, and
``python -m tests.protocol.test_triton_refusals PORT`` asks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.protocol.test_triton import ask, meaning

if TYPE_CHECKING:
    from tests.conftest import Headrace

RECORD = Path(__file__).with_name("triton_refusals.json")
QUESTIONS: list[dict[str, Any]] = json.loads(RECORD.read_text())
#: Data type, rows at most, inputs, and further fields of each input.
MODELS = {
    "pair": ("FP32", 8, 2, ""),
    "trio": ("FP32", 8, 3, ""),
    "words": ("STRING", 0, 2, ""),
    "any": ("FP32", 0, 3, "optional: true"),
}
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no mistake was found")) for _ in requests]
"""


def write_repository(root: Path, backend: str) -> None:
    """Models whose inputs are ``IN0``, ``IN1`` and so on, with two elements each."""
    for name, (datatype, rows, count, rest) in MODELS.items():
        (root / name / "1").mkdir(parents=True)
        tensors = [
            f'input {{ name: "IN{number}" data_type: TYPE_{datatype} dims: [2] {rest} }}\n'
            f'output {{ name: "OUT{number}" data_type: TYPE_{datatype} dims: [2] }}\n'
            for number in range(count)
        ]
        (root / name / "config.pbtxt").write_text(f'backend: "{backend}" max_batch_size: {rows}\n{"".join(tensors)}')
        (root / name / "1" / "model.py").write_text(MODEL)


@pytest.fixture(scope="module")
def port(keep_serving: Callable[..., Headrace], tmp_path_factory: pytest.TempPathFactory) -> int:
    repository = tmp_path_factory.mktemp("refusing")
    write_repository(repository, "identity")
    return keep_serving(f"--model-repository={repository}").http


@pytest.mark.parametrize("question", QUESTIONS, ids=[f"{i}-{q['path'].split('/')[3]}" for i, q in enumerate(QUESTIONS)])
def test_headrace_names_the_mistake_that_triton_names_or_has_a_reason(port: int, question: dict[str, Any]) -> None:
    status, body = ask(port, question)
    is_same = (status, meaning(body)) == (question["status"], meaning(question["answer"]))
    assert is_same is ("deviation" not in question), body


if __name__ == "__main__":
    if not sys.argv[1].isdigit():
        write_repository(Path(sys.argv[1]), "python")
    else:
        for question in QUESTIONS:
            question["status"], question["answer"] = ask(int(sys.argv[1]), question)
        RECORD.write_text("".join(("[\n", ",\n".join(map(json.dumps, QUESTIONS)), "\n]\n")))
