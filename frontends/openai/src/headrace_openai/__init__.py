"""OpenAI's routes: ``/v1/models`` and others, for every model with the contract of `headrace_llm`.

- `headrace_openai.openai_extension`: the extension, with all routes
- `headrace_openai.openai_route`: what all routes share
- `headrace_openai.catalog`: which models there are, and what each can do
"""

from __future__ import annotations

from headrace import Extension, Frontend, OptionGroup, hookimpl
from headrace_openai.openai_extension import OpenAi
from headrace_openai.openai_options import OpenAiOptions
from headrace_openai.openai_port import OpenAiPort

__all__ = ["OpenAi", "OpenAiOptions"]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [OpenAi]


@hookimpl
def register_frontends() -> list[type[Frontend]]:
    return [OpenAiPort]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [OpenAiOptions]
