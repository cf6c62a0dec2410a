"""``/v1/models``, and errors in OpenAI's form."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from headrace import BackendError, Unavailable, Unsupported
from headrace_http.message import error_reply
from headrace_openai.openai_errors import as_openai

if TYPE_CHECKING:
    from tests.conftest import Headrace


def test_the_client_lists_the_language_models(client: openai.OpenAI) -> None:
    found = {model.id: model for model in client.models.list()}
    assert "story" in found
    assert "plain" not in found
    assert found["story"].owned_by == "python"
    assert client.models.retrieve("story").id == "story"


@pytest.mark.parametrize("name", ["nobody", "plain"])
def test_a_model_that_is_none_is_not_found(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve(name)
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"
    assert name in raised.value.message


def test_a_request_has_the_id_of_its_caller_or_a_new_one(web: httpx.Client) -> None:
    assert web.get("/models").headers["x-request-id"].startswith("req_")
    for path in ("/models", "/models/nobody"):
        assert web.get(path, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
def test_a_client_of_vllms_server_or_tritons_frontend_learns_that_the_server_is_ready(
    web: httpx.Client, path: str
) -> None:
    found = httpx.get(web.base_url.join(path))
    assert (found.status_code, found.content) == (200, b"")


def test_a_port_of_its_own_has_these_routes_only(server: Headrace) -> None:
    (port,) = re.findall(r"OpenAI Service at \S+:(\d+)", server.log)
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["object"] == "list"
    body = {"model": "story", "prompt": "a b"}
    assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body).json()["choices"][0]["text"] == " a b"
    assert httpx.get(f"http://127.0.0.1:{port}/v2").status_code == 404


def test_a_fault_of_the_caller_is_not_sent_again() -> None:
    """Clients of OpenAI send what is answered with 5xx twice more."""
    for error, status in ((Unsupported("not here"), 400), (BackendError("broken"), 500), (Unavailable("later"), 503)):
        reply = as_openai(error, error_reply(error), "POST /v1/completions")
        assert reply.status == status
        assert json.loads(bytes(reply.parts[0]))["error"]["message"] == error.message
