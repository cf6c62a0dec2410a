"""The extension ``openai``, and the routes of tasks, whose handlers are imported when a model of the task is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from typing import ClassVar

from headrace import Addition, ExtensionOperation, HeadraceError, HttpCall, HttpReply, HttpStream, ServedModel, hookimpl
from headrace_llm import Contract, Task
from headrace_openai import descriptions
from headrace_openai.language_models import LanguageModels
from headrace_openai.model_routes import FrontendReadiness, LanguageModelDescription, LanguageModelList, ServerReadiness
from headrace_openai.openai_route import OpenAiRoute


class TaskRoute(OpenAiRoute):
    """A route for the models of one task."""

    task: ClassVar[Task]
    #: The module of this package that answers, and its class.
    answers: ClassVar[tuple[str, str]]

    async def answer(self, call: HttpCall) -> HttpReply | HttpStream:
        return await self._handler.answer(call)

    @cached_property
    def _handler(self) -> OpenAiRoute:
        module, name = self.answers
        handler: OpenAiRoute = getattr(import_module(f"headrace_openai.{module}"), name)(self.extension)
        return handler


class ChatCompletions(TaskRoute):
    """The next message of a chat, in OpenAI's form"""

    name = "POST /v1/chat/completions"
    operation = ExtensionOperation("chat_completions", has_parts=True)
    openapi = descriptions.CHAT
    task, answers = Task.GENERATION, ("chat_routes", "ChatHandler")


class Completions(TaskRoute):
    """The text that follows a prompt, in OpenAI's form"""

    name = "POST /v1/completions"
    operation = ExtensionOperation("completions", has_parts=True)
    openapi = descriptions.COMPLETION
    task, answers = Task.GENERATION, ("completion_routes", "CompletionHandler")


class Responses(TaskRoute):
    """The next answer of a conversation, in the form of OpenAI's responses"""

    name = "POST /v1/responses"
    operation = ExtensionOperation("responses", has_parts=True)
    openapi = descriptions.RESPONSE
    task, answers = Task.GENERATION, ("response_route", "ResponseHandler")


class Embeddings(TaskRoute):
    """Return a vector for each text"""

    name = "POST /v1/embeddings"
    operation = ExtensionOperation("embeddings", has_parts=True)
    openapi = descriptions.EMBEDDINGS
    task, answers = Task.EMBEDDING, ("task_routes", "EmbeddingHandler")


class Rerank(TaskRoute):
    """Return documents by their relevance to a query"""

    name = "POST /v1/rerank"
    operation = ExtensionOperation("rerank", has_parts=True)
    openapi = descriptions.RERANK
    task, answers = Task.RERANKING, ("task_routes", "RerankHandler")


class RerankOfJina(Rerank):
    """The same, on the path of Jina's local servers"""

    name = "POST /rerank"


class RerankOfCohere(Rerank):
    """The same, on the path of Cohere's second API"""

    name = "POST /v2/rerank"


class Transcriptions(TaskRoute):
    """Return the text of a file with speech"""

    name = "POST /v1/audio/transcriptions"
    operation = ExtensionOperation("transcriptions", has_parts=True)
    openapi = descriptions.TRANSCRIPTION
    task, answers = Task.TRANSCRIPTION, ("transcription_routes", "TranscriptionHandler")

    @property
    def max_body_bytes(self) -> int | None:
        return None  # a file: that of the port


_TASK_ROUTES = (
    ChatCompletions, Completions, Responses, Embeddings, Rerank, RerankOfJina, RerankOfCohere, Transcriptions
)  # fmt: skip


class OpenAi(LanguageModels):
    """OpenAI's routes of one server."""

    adds: ClassVar[Sequence[type[Addition]]] = (
        LanguageModelList,
        LanguageModelDescription,
        ServerReadiness,
        FrontendReadiness,
        *_TASK_ROUTES,
    )

    @hookimpl
    def model_loaded(self, model: ServedModel) -> None:
        """Import what answers requests for ``model``, on the thread that loads it: the first request need not."""
        try:
            contract = Contract.of(model.view)
        except HeadraceError:  # a request gets the error
            return
        for route in _TASK_ROUTES:
            if contract is not None and route.task is contract.task:
                import_module(f"headrace_openai.{route.answers[0]}")
