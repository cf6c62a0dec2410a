"""Each question of ``answers.json`` is answered as by Triton 2.51."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frontends.cloud_routes.conftest import Serve
from tests.frontends.cloud_routes.recorded import RECORD, ROOT, Answer, ask


@pytest.mark.parametrize("host", ["native", "hypercorn"])
def test_both_ports_answer_as_triton_does(serve: Serve, shared: Path, host: str) -> None:
    if host != "native":
        pytest.importorskip(f"headrace_{host}")
    ports = serve(f"--http-server={host}")
    for question in json.loads(RECORD.read_text()):
        expected = Answer(*(question[name] for name in Answer._fields))
        asked = {**question, "body": question["body"].replace(ROOT, str(shared))}
        found = ask(ports[question["port"]], asked)
        shown = {key: question[key] for key in ("port", "method", "path", "headers", "body")}
        assert found.status == expected.status, (shown, found, expected)
        assert found.length == expected.length, (shown, found, expected)
        if expected.content_type != "text/plain":  # which Triton sends with every answer that has no other type
            assert found.content_type == expected.content_type, (shown, found, expected)
        if not is_worded_otherwise(question, expected):
            assert body(found.answer) == body(expected.answer), (shown, found, expected)


def is_worded_otherwise(question: dict[str, Any], expected: Answer) -> bool:
    """True for the server's name and version, and for refusals that do not show the paths of the server."""
    is_load = question["method"] == "POST" and question["path"] == "/models"
    redirect = question["headers"].get("X-Vertex-Ai-Triton-Redirect")
    return (is_load and expected.status >= 400) or redirect in ("v2", "v2/models/echo")


def body(text: str) -> Any:
    """Return ``text`` as JSON, or as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
