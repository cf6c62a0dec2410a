"""Asks a real Triton the questions of ``triton.json`` again, and writes down its answers.

The model is ``pyident`` of the bench models: FP32 INPUT0 [-1] to OUTPUT0, max_batch_size 64. Run
``python tests/protocol/record_triton.py PORT`` while a Triton that serves only it listens there.
"""

from __future__ import annotations

import http.client
import json
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("triton.json")


def ask(port: int, question: dict[str, Any]) -> tuple[int, str]:
    """Status and body. Bodies are bytes, written as Latin-1."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        body = question["body"]
        headers = question["headers"]
        connection.request(question["method"], question["path"], body and body.encode("latin-1"), headers)
        response = connection.getresponse()
        return response.status, response.read().decode("latin-1")
    finally:
        connection.close()


def record(port: int) -> None:
    """Renew the answers; the reasons for deviations stay."""
    questions = json.loads(RECORD.read_text())
    for question in questions:
        question["status"], question["answer"] = ask(port, question)
    RECORD.write_text("".join(("[\n", ",\n".join(map(json.dumps, questions)), "\n]\n")))


if __name__ == "__main__":
    record(int(sys.argv[1]))
