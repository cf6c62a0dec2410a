"""What ``/openapi.json`` says of OpenAI's routes: their members, and examples that work."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

#: A model of these tests for each route with an example, and what it replaces.
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "story"},
    "/v1/completions": {"model": "story"},
    "/v1/responses": {"model": "story"},
    "/v1/embeddings": {"model": "embed"},
    "/v1/rerank": {"model": "rerank"},
    "/v2/rerank": {"model": "rerank"},
    "/rerank": {"model": "rerank"},
}


@pytest.fixture(scope="module")
def paths(web: httpx.Client) -> dict[str, Any]:
    description = web.get("/../openapi.json").json()
    assert [error.message for error in OpenAPIV31SpecValidator(description).iter_errors()] == []
    found: dict[str, Any] = description["paths"]
    return found


@pytest.mark.parametrize("path", EXAMPLES)
def test_the_example_of_a_route_works(web: httpx.Client, paths: dict[str, Any], path: str) -> None:
    content = paths[path]["post"]["requestBody"]["content"]["application/json"]
    assert content["schema"]["required"][0] == "model"
    assert content["example"].keys() <= content["schema"]["properties"].keys()
    answer = web.post(f"/..{path}", json=content["example"] | EXAMPLES[path])
    assert answer.status_code == 200, answer.text


def test_a_file_is_a_part_of_a_form_and_errors_are_openais(paths: dict[str, Any]) -> None:
    operation = paths["/v1/audio/transcriptions"]["post"]
    assert {"file", "model"} <= operation["requestBody"]["content"]["multipart/form-data"]["schema"][
        "properties"
    ].keys()
    error = operation["responses"]["default"]["content"]["application/json"]["schema"]
    assert json.dumps(error).count('"message"') == 1
