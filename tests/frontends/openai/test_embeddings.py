"""``/v1/embeddings`` by the stock client. The model counts letters, so each expected vector is arithmetic."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest


def counts(text: str) -> list[float]:
    return [float(text.count(letter)) for letter in "abcd"]


@pytest.mark.parametrize("form", [openai.NOT_GIVEN, "float"])
def test_the_client_gets_a_vector_for_each_text(client: openai.OpenAI, form: Any) -> None:
    texts = [f"{'a' * number}b c dd" for number in range(20)]  # more than a batch
    found = client.embeddings.create(model="embed", input=texts, encoding_format=form)
    assert [each.embedding for each in found.data] == [counts(text) for text in texts]
    assert [each.index for each in found.data] == list(range(20))
    assert found.usage.prompt_tokens == found.usage.total_tokens == 60
    assert found.model == "embed"


def test_one_text_is_an_array_of_one(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model="embed", input="abba")
    assert [each.embedding for each in found.data] == [[2, 2, 0, 0]]


@pytest.mark.parametrize("tokens", [[0, 3, 3, 7], [[0, 3, 3, 7], [1]]])
def test_tokens_are_a_text(client: openai.OpenAI, tokens: Any) -> None:
    found = client.embeddings.create(model="embed", input=tokens)
    assert [each.embedding for each in found.data] == [[1, 0, 0, 2], [0, 1, 0, 0]][: len(found.data)]
    assert found.usage.prompt_tokens == (4 if len(found.data) == 1 else 5)


def test_a_model_without_batches_and_counts_is_asked_once_for_each_text(client: openai.OpenAI) -> None:
    texts = [f"{'c' * number}" for number in range(40)]
    found = client.embeddings.create(model="single", input=texts)
    assert [each.embedding for each in found.data] == [counts(text) for text in texts]
    assert found.usage.prompt_tokens == 0


def test_a_shortened_vector_has_length_1(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model="single", input="aaabbbbcd", dimensions=2)
    assert found.data[0].embedding == pytest.approx([3 / 5, 4 / 5])
    assert client.embeddings.create(model="single", input="aaab", dimensions=4).data[0].embedding == [3, 1, 0, 0]


def test_many_numbers_are_printed_as_few_are(web: httpx.Client) -> None:
    answer = web.post("/embeddings", json={"model": "embed", "input": ["ab"] * 2048}).json()
    assert len(answer["data"]) == 2048
    assert {tuple(each["embedding"]) for each in answer["data"]} == {(1, 1, 0, 0)}
    one_more = web.post("/embeddings", json={"model": "embed", "input": ["ab"] * 2049})
    assert one_more.status_code == 400
    assert one_more.json()["error"]["message"] == "input has 2049 texts, the limit is 2048"


@pytest.mark.parametrize(
    ("asked", "param", "why"),
    [
        ({"input": []}, "input", "input is empty"),
        ({}, "input", "input must be a text"),
        ({"input": [[]]}, "input", "input must be a text"),
        ({"input": ["a", 1]}, "input", "input must be a text"),
        ({"input": [[0.5]]}, "input", "input must be a text"),
        ({"input": [[-1]]}, "input", "a token is from 0 to 2147483647"),
        ({"input": [[2**40]]}, "input", "a token is from 0 to 2147483647"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "must be float or base64, got 'hex'"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1, got 0"),
        ({"input": "a", "dimensions": 2}, "dimensions", "'is_matryoshka' is not true"),
        ({"model": "single", "input": "a", "dimensions": 5}, "dimensions", "model 'single' has 4"),
        ({"model": "single", "input": [1]}, "input", "takes texts only"),
        ({"model": "rerank", "input": "a"}, "model", "does reranking, this path is for embedding"),
        ({"model": "", "input": "a"}, "model", "the name of a model"),
    ],
)
def test_what_is_wrong_is_named(web: httpx.Client, asked: dict[str, Any], param: str, why: str) -> None:
    answer = web.post("/embeddings", json={"model": "embed"} | asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert why in answer.json()["error"]["message"]


def test_half_a_surrogate_pair_is_refused(web: httpx.Client) -> None:
    answer = web.post("/embeddings", content=b'{"model": "embed", "input": "\\ud800"}')
    assert answer.status_code == 400
    assert "error" in answer.json()


def test_a_failing_text_fails_the_request_and_no_other(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="this text makes it fail"):
        client.embeddings.create(model="embed", input=["a"] * 100 + ["fail"])
    with pytest.raises(openai.InternalServerError, match="a number that is not finite"):
        client.embeddings.create(model="embed", input="nan")
    assert client.embeddings.create(model="embed", input="a").data[0].embedding == [1, 0, 0, 0]


@pytest.mark.parametrize("texts", ["slow", ["slow"] * 20])
def test_a_request_that_is_late_ends_at_its_deadline(web: httpx.Client, texts: Any) -> None:
    headers = {"request-timeout-ms": "20"}
    answer = web.post("/embeddings", json={"model": "embed", "input": texts}, headers=headers)
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["message"] == "Request timeout expired"
