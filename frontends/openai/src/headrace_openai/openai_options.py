"""The flags of OpenAI's routes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from headrace import OptionGroup
from headrace_openai.image_addresses import ImageHosts


@dataclass(frozen=True)
class OpenAiOptions(OptionGroup):
    """OpenAI's routes, `/v1/...`."""

    name: ClassVar[str] = "openai"
    lora_separator: str = field(
        default=":",
        metadata={"help": "A request for model m and adapter a names the model m:a. Empty: there are no adapters."},
    )
    image_hosts: str = field(
        default="",
        metadata={
            "help": "Hosts from which images in messages are fetched, separated by commas: a.example, *.b.example, "
            "10.0.0.0/8. Empty: none."
        },
    )

    def __post_init__(self) -> None:
        try:
            ImageHosts(self.image_hosts)
        except ValueError as error:
            raise ValueError(f"--openai-image-hosts: {error}") from None
