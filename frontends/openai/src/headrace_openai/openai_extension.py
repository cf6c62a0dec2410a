"""The extension ``openai``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace import Addition
from headrace_openai.chat_routes import ChatCompletions
from headrace_openai.completion_routes import Completions
from headrace_openai.language_models import LanguageModels
from headrace_openai.model_routes import FrontendReadiness, LanguageModelDescription, LanguageModelList, ServerReadiness
from headrace_openai.response_route import Responses
from headrace_openai.task_routes import TASK_ROUTES


class OpenAi(LanguageModels):
    """OpenAI's routes of one server."""

    adds: ClassVar[Sequence[type[Addition]]] = (
        LanguageModelList,
        LanguageModelDescription,
        ServerReadiness,
        FrontendReadiness,
        ChatCompletions,
        Completions,
        Responses,
        *TASK_ROUTES,
    )
