"""A real Triton's answers to the same raw requests (``triton.json``, recorded by ``record_triton.py``).

Triton 2.51 is the newest that can be had as a wheel; the specification is of 2.73. Where the two
differ, or where Penstock means to differ, a question carries its ``deviation``.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Penstock

QUESTIONS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("triton.json").read_text())
CONFIG = """
backend: "identity" max_batch_size: 64 dynamic_batching { }
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
"""


@pytest.fixture(scope="module")
def server(keep_serving: Callable[..., Penstock], tmp_path_factory: pytest.TempPathFactory) -> Penstock:
    repository = tmp_path_factory.mktemp("triton")
    (repository / "pyident" / "1").mkdir(parents=True)
    (repository / "pyident" / "config.pbtxt").write_text(CONFIG)
    return keep_serving(f"--model-repository={repository}")


def ask(port: int, question: dict[str, Any]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        body = question["body"]
        connection.request(question["method"], question["path"], body and body.encode("latin-1"), question["headers"])
        response = connection.getresponse()
        return response.status, meaning(response.read().decode("latin-1"))
    finally:
        connection.close()


def meaning(body: str) -> Any:
    """JSON as values, because number formats differ (1e20 and 100000000000000000000.0); NaN as text."""
    try:
        return json.loads(body, parse_constant=str)
    except ValueError:
        return body


@pytest.mark.parametrize("question", QUESTIONS, ids=[f"{i}-{q['method']}-{q['path']}" for i, q in enumerate(QUESTIONS)])
def test_penstock_answers_as_triton_does_or_has_a_reason(server: Penstock, question: dict[str, Any]) -> None:
    answer = ask(server.http, question)
    recorded = question["status"], meaning(question["answer"])
    if "deviation" in question:
        assert answer != recorded, "it does not deviate any more"
    else:
        assert answer == recorded
