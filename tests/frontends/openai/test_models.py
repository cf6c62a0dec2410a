"""``/v1/models``, and errors in OpenAI's form."""

from __future__ import annotations

import httpx
import openai
import pytest


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
