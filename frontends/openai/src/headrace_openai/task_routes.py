"""``/v1/embeddings`` and ``/v1/rerank``: the routes of models that read texts and write none. All but generation."""

from __future__ import annotations

from headrace import Addition, ExtensionOperation, HttpCall, HttpReply
from headrace_llm import Task
from headrace_openai.descriptions import EMBEDDINGS, RERANK
from headrace_openai.embeddings import embedding_requests, print_embeddings, read_embeddings, vectors_in
from headrace_openai.inferences import ending, responses_to
from headrace_openai.openai_route import OpenAiRoute, json_answer, model_name, read_body, request_id
from headrace_openai.rerank import print_rerank, read_rerank, rerank_requests
from headrace_openai.transcription_routes import Transcriptions


class Embeddings(OpenAiRoute):
    """Return a vector for each text"""

    name = "POST /v1/embeddings"
    operation = ExtensionOperation("embeddings", has_parts=True)
    openapi = EMBEDDINGS

    async def answer(self, call: HttpCall) -> HttpReply:
        document, id_ = await read_body(call), request_id(call.request)
        name = model_name(document)
        caller = await self.admit(call, name)
        with ending(caller):
            asked, model = read_embeddings(document), self.extension.models.find(name, Task.EMBEDDING)
            responses = await responses_to(
                self.engine, embedding_requests(asked, model, id_), caller, call.caller.deadline_ns
            )
            vectors, tokens = vectors_in(responses, model, asked.dimensions)
            return json_answer(await print_embeddings(vectors, tokens, name, asked.is_base64), id_)


class Rerank(OpenAiRoute):
    """Return documents by their relevance to a query"""

    name = "POST /v1/rerank"
    operation = ExtensionOperation("rerank", has_parts=True)
    openapi = RERANK

    async def answer(self, call: HttpCall) -> HttpReply:
        document, id_ = await read_body(call), request_id(call.request)
        name = model_name(document)
        caller = await self.admit(call, name)
        with ending(caller):
            asked, model = read_rerank(document), self.extension.models.find(name, Task.RERANKING)
            responses = await responses_to(
                self.engine, rerank_requests(asked, model, id_), caller, call.caller.deadline_ns
            )
            return json_answer(print_rerank(asked, responses, model, id_), id_)


class RerankOfJina(Rerank):
    """The same, on the path of Jina's local servers"""

    name = "POST /rerank"


class RerankOfCohere(Rerank):
    """The same, on the path of Cohere's second API"""

    name = "POST /v2/rerank"


TASK_ROUTES: tuple[type[Addition], ...] = (Embeddings, Rerank, RerankOfJina, RerankOfCohere, Transcriptions)
