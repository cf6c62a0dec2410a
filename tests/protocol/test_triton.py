"""A real Triton's answers to the same raw requests, recorded in ``triton.json``.

Triton 2.51 is the newest that can be had as a wheel; the specification is of 2.73. Where the two
differ, or where Headrace means to differ, a question carries its ``deviation``.

``python tests/protocol/test_triton.py PORT`` asks a Triton that serves only the bench model
``pyident`` there again, and writes down its answers; the deviations stay.
"""

from __future__ import annotations

import http.client
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

RECORD = Path(__file__).with_name("triton.json")
QUESTIONS: list[dict[str, Any]] = json.loads(RECORD.read_text())


def ask(port: int, question: dict[str, Any]) -> tuple[int, str]:
    """Status and body. Bodies are bytes, written as Latin-1."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        body = question["body"]
        connection.request(question["method"], question["path"], body and body.encode("latin-1"), question["headers"])
        response = connection.getresponse()
        return response.status, response.read().decode("latin-1")
    finally:
        connection.close()


def meaning(body: str) -> Any:
    """JSON as values, because number formats differ (1e20 and 100000000000000000000.0); NaN as text."""
    try:
        return json.loads(body, parse_constant=str)
    except ValueError:
        return body


@pytest.mark.parametrize("question", QUESTIONS, ids=[f"{i}-{q['method']}-{q['path']}" for i, q in enumerate(QUESTIONS)])
def test_headrace_answers_as_triton_does_or_has_a_reason(
    identity_of_triton: Headrace, question: dict[str, Any]
) -> None:
    status, body = ask(identity_of_triton.http, question)
    answer = status, meaning(body)
    recorded = question["status"], meaning(question["answer"])
    if "deviation" in question:
        assert answer != recorded, "it does not deviate any more"
    else:
        assert answer == recorded


if __name__ == "__main__":
    for question in QUESTIONS:
        question["status"], question["answer"] = ask(int(sys.argv[1]), question)
    RECORD.write_text("".join(("[\n", ",\n".join(map(json.dumps, QUESTIONS)), "\n]\n")))
