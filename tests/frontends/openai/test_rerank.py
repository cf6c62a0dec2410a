"""``/v1/rerank``, and the paths on which clients of Jina and Cohere ask."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

DOCUMENTS = ["xyz", "abc", "a", "ab", "ba"]
ASKED = {"model": "rerank", "query": "abc", "documents": DOCUMENTS}


@pytest.mark.parametrize("path", ["/rerank", "/../rerank", "/../v2/rerank"])
def test_the_most_relevant_document_is_first(web: httpx.Client, path: str) -> None:
    answer = web.post(path, json=ASKED).json()
    assert [(each["index"], each["relevance_score"]) for each in answer["results"]] == [
        (1, 3), (3, 2), (4, 2), (2, 1), (0, 0)
    ]  # fmt: skip
    assert [each["document"]["text"] for each in answer["results"]] == ["abc", "ab", "ba", "a", "xyz"]
    assert answer["usage"] == {"prompt_tokens": 0, "total_tokens": 0}


def test_a_caller_may_want_few_results_without_documents(web: httpx.Client) -> None:
    documents = [{"text": text} for text in DOCUMENTS]
    asked = ASKED | {"top_n": 2, "return_documents": False, "documents": documents}
    assert web.post("/rerank", json=asked).json()["results"] == [
        {"index": 1, "relevance_score": 3},
        {"index": 3, "relevance_score": 2},
    ]


@pytest.mark.parametrize(
    ("asked", "param", "why"),
    [
        ({"query": ""}, "query", "query must be a text"),
        ({"query": None}, "query", "query must be a text, got nothing"),
        ({"documents": []}, "documents", "not empty"),
        ({"documents": dict.fromkeys(map(str, range(30)))}, "documents", "not empty, got an object with 30 members"),
        ({"documents": ["a", 3]}, "documents", "documents[1] must be a text"),
        ({"documents": ["a"] * 2049}, "documents", "the limit is 2048"),
        ({"query": "a" * 16385, "documents": ["a"] * 2048}, "query", "the limit is 33554432 bytes for all copies"),
        ({"top_n": 0}, "top_n", "at least 1, got 0"),
        ({"return_documents": "yes"}, "return_documents", "true or false"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc", "not supported"),
        ({"model": "embed"}, "model", "does embedding, this path is for reranking"),
    ],
)
def test_what_is_wrong_is_named(web: httpx.Client, asked: dict[str, Any], param: str, why: str) -> None:
    answer = web.post("/rerank", json=ASKED | asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert why in answer.json()["error"]["message"]
