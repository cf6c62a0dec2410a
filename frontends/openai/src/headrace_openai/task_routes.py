"""The answers of ``/v1/embeddings`` and ``/v1/rerank``: models that read texts and write none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from headrace import HttpCall, HttpReply, InferRequest, InferResponse
from headrace_llm import Task
from headrace_openai.catalog import LanguageModel
from headrace_openai.embeddings import (
    EmbeddingsRequest,
    embedding_requests,
    print_embeddings,
    read_embeddings,
    vectors_in,
)
from headrace_openai.inferences import ending, responses_to
from headrace_openai.openai_route import (
    SMALL_BYTES,
    OpenAiRoute,
    json_answer,
    model_name,
    off_loop,
    read_body,
    request_id,
)
from headrace_openai.rerank import RerankRequest, print_rerank, read_rerank, rerank_requests


class RowsRoute(OpenAiRoute):
    """A route with one inference for each row of a body: a text, or a document."""

    #: The task of its models.
    task: ClassVar[Task]

    async def answer(self, call: HttpCall) -> HttpReply:
        document, id_ = await read_body(call), request_id(call.request)
        name = model_name(document)
        caller = await self.admit(call, name)
        with ending(caller):
            asked, model = self.read(document), self.extension.models.find(name, self.task)
            is_small = call.request.body.nbytes <= SMALL_BYTES
            requests = await off_loop(self.engine, is_small, lambda: self.requests(asked, model, id_))
            responses = await responses_to(self.engine, requests, caller, call.caller.deadline_ns)
            return json_answer(await self.print(asked, responses, model, id_), id_)

    def read(self, document: dict[str, Any]) -> Any:
        """Return the request in ``document``. Raises `BadMember`."""
        raise NotImplementedError

    def requests(self, asked: Any, model: LanguageModel, request_id: str) -> list[InferRequest]:
        """Return the requests to ``model``. Raises `BadMember` if it can not do what is ``asked``."""
        raise NotImplementedError

    async def print(
        self, asked: Any, responses: Sequence[InferResponse], model: LanguageModel, request_id: str
    ) -> bytes:
        """Return the answer as JSON. Raises `BackendError` for responses that are none."""
        raise NotImplementedError


class EmbeddingHandler(RowsRoute):
    """Answers with a vector for each text."""

    task = Task.EMBEDDING

    def read(self, document: dict[str, Any]) -> EmbeddingsRequest:
        return read_embeddings(document)

    def requests(self, asked: EmbeddingsRequest, model: LanguageModel, request_id: str) -> list[InferRequest]:
        return embedding_requests(asked, model, request_id)

    async def print(
        self, asked: EmbeddingsRequest, responses: Sequence[InferResponse], model: LanguageModel, request_id: str
    ) -> bytes:
        vectors, tokens = vectors_in(responses, model, asked.dimensions)
        return await print_embeddings(vectors, tokens, model.name, asked.is_base64)


class RerankHandler(RowsRoute):
    """Answers with documents by their relevance to a query."""

    task = Task.RERANKING

    def read(self, document: dict[str, Any]) -> RerankRequest:
        return read_rerank(document)

    def requests(self, asked: RerankRequest, model: LanguageModel, request_id: str) -> list[InferRequest]:
        return rerank_requests(asked, model, request_id)

    async def print(
        self, asked: RerankRequest, responses: Sequence[InferResponse], model: LanguageModel, request_id: str
    ) -> bytes:
        return print_rerank(asked, responses, model, request_id)
