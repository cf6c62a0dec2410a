"""The state that the routes of one server share: its language models and flags."""

from __future__ import annotations

from typing import ClassVar

from headrace import Engine, Extension
from headrace_openai.catalog import ModelCatalog
from headrace_openai.image_addresses import ImageFetcher, ImageHosts
from headrace_openai.openai_options import OpenAiOptions


class LanguageModels(Extension):
    """The language models of one server, and the flags. `headrace_openai.openai_extension.OpenAi` adds the routes."""

    name: ClassVar[str] = "openai"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.settings = engine.options.group(OpenAiOptions)
        self.images = ImageFetcher(ImageHosts(self.settings.image_hosts))
        self.models = ModelCatalog(engine, self.settings.lora_separator)
