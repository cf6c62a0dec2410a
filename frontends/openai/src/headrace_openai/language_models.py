"""The state that the routes of one server share: its language models and flags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from headrace import Engine, Extension, ServedModel, hookimpl
from headrace_llm import TASK
from headrace_openai.catalog import ModelCatalog
from headrace_openai.chat_templates import PARAMETER as TEMPLATE
from headrace_openai.chat_templates import PARSER
from headrace_openai.image_hosts import ImageHosts
from headrace_openai.openai_options import OpenAiOptions

if TYPE_CHECKING:
    from headrace_openai.image_addresses import ImageFetcher

#: The model parameter that is ``true`` if a vector may be cut to its first numbers: the model was trained for it.
SHORTENS = "is_matryoshka"


class LanguageModels(Extension):
    """The language models of one server, and the flags. `headrace_openai.openai_extension.OpenAi` adds the routes."""

    name: ClassVar[str] = "openai"
    model_parameters: ClassVar[Sequence[str]] = (TASK, TEMPLATE, PARSER, SHORTENS)

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.settings = engine.options.group(OpenAiOptions)
        self.models = ModelCatalog(engine, self.settings.lora_separator)

    @cached_property
    def images(self) -> ImageFetcher:
        """The images of messages that are named by an address. On the event loop."""
        from headrace_openai.image_addresses import ImageFetcher

        return ImageFetcher(ImageHosts(self.settings.image_hosts))

    @hookimpl
    def observe_model(self, model: ServedModel) -> None:
        """Fail the load of a model whose template or parser is wrong."""
        self.models.templates.load(model)

    @hookimpl
    def model_unloaded(self, model: ServedModel) -> None:
        self.models.forget(model.name)
