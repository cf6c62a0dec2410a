"""``/v1/rerank``: a query and documents in, the documents by their relevance out.

Source: the form of Jina (https://api.jina.ai) and Cohere (https://docs.cohere.com/reference/rerank), as vLLM and
llama.cpp serve it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from headrace import BackendError, InferRequest, InferResponse
from headrace_openai.body_members import shown
from headrace_openai.catalog import LanguageModel
from headrace_openai.embeddings import tokens_in
from headrace_openai.inferences import MAX_ROWS, encode_text, row_requests
from headrace_openai.openai_errors import BadMember

#: Members of Cohere's that would change the scores.
_REFUSED = ("max_chunks_per_doc", "max_tokens_per_doc", "rank_fields", "truncate_prompt_tokens")

#: The most bytes of all copies of a query: the model gets it beside each document.
MAX_QUERY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """The request of a caller. ``most`` is the most results in the answer."""

    query: str
    documents: Sequence[str]
    most: int
    returns_documents: bool


def read_rerank(document: dict[str, Any]) -> RerankRequest:
    """Return the request in ``document``. Raises `BadMember`."""
    for name in _REFUSED:
        if document.get(name) is not None:
            raise BadMember(name, f"{name} is not supported: the model reads each document as it is")
    query, documents = document.get("query"), document.get("documents")
    if type(query) is not str or not query:
        raise BadMember("query", f"query must be a text, got {shown(query)}")
    if type(documents) is not list or not documents:
        raise BadMember("documents", f"documents must be an array of texts, not empty, got {shown(documents)}")
    if len(documents) > MAX_ROWS:
        raise BadMember("documents", f"documents has {len(documents)} texts, the limit is {MAX_ROWS}")
    texts: list[Any] = [each.get("text") if type(each) is dict else each for each in documents]
    for number, text in enumerate(texts):
        if type(text) is not str:
            raise BadMember(
                "documents", f"documents[{number}] must be a text, or an object with a text, got {shown(text)}"
            )
    most = document.get("top_n")
    if most is not None and (type(most) is not int or most < 1):
        raise BadMember("top_n", f"top_n must be a whole number of at least 1, got {shown(most)}")
    returns = document.get("return_documents", True)
    if type(returns) is not bool:
        raise BadMember("return_documents", f"return_documents must be true or false, got {shown(returns)}")
    return RerankRequest(query, texts, len(texts) if most is None else most, returns)


def rerank_requests(asked: RerankRequest, model: LanguageModel, request_id: str) -> list[InferRequest]:
    """Return the requests to ``model``: the query beside each document. Raises `BadMember` for too long a query."""
    query = encode_text(asked.query, "query")
    if len(query) * len(asked.documents) > MAX_QUERY_BYTES:
        raise BadMember(
            "query",
            f"query has {len(query)} bytes, and there are {len(asked.documents)} documents: the limit is "
            f"{MAX_QUERY_BYTES} bytes for all copies of the query",
        )
    texts = [encode_text(text, "documents") for text in asked.documents]
    columns = [(model.contract.inputs["query"], [query] * len(texts)), (model.contract.inputs["document"], texts)]
    return row_requests(model.view, columns, [spec.name for spec in model.contract.outputs.values()], request_id)


def print_rerank(
    asked: RerankRequest, responses: Sequence[InferResponse], model: LanguageModel, request_id: str
) -> bytes:
    """Return the answer as JSON: the most relevant document first. Raises `BackendError` for scores that are none."""
    name = model.contract.outputs["score"].name
    scores = np.concatenate([np.asarray(response.outputs[name], np.float64).ravel() for response in responses])
    if len(scores) != len(asked.documents) or not np.isfinite(scores).all():
        raise BackendError(f"model '{model.name}' gave {len(scores)} scores for {len(asked.documents)} documents")
    order = np.argsort(-scores, kind="stable")[: asked.most]
    results: list[dict[str, Any]] = [{"index": int(at), "relevance_score": float(scores[at])} for at in order]
    if asked.returns_documents:
        for result in results:
            result["document"] = {"text": asked.documents[result["index"]]}
    tokens = tokens_in(responses, model)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return orjson.dumps(
        {"id": f"rerank-{request_id}", "object": "list", "model": model.name, "usage": usage, "results": results}
    )
