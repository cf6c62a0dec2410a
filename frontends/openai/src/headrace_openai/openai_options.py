"""The flags of OpenAI's routes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from headrace import OptionGroup


@dataclass(frozen=True)
class OpenAiOptions(OptionGroup):
    """OpenAI's routes, `/v1/...`."""

    name: ClassVar[str] = "openai"
    lora_separator: str = field(
        default=":",
        metadata={"help": "A request for model m and adapter a names the model m:a. Empty: there are no adapters."},
    )
