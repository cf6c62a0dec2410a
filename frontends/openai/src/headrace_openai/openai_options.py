"""The flags of OpenAI's routes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from headrace import OptionGroup
from headrace_openai.image_hosts import ImageHosts


def _wide_hosts(text: str) -> list[str]:
    return [f"images from {each}, at addresses in messages" for each in ImageHosts(text).wide()]


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
            "10.0.0.0/8. Empty: none.",
            "opens": _wide_hosts,
        },
    )

    max_body_bytes: int = field(
        default=32 << 20,
        metadata={"help": "The largest body of a request with JSON, such as a chat with images, in bytes."},
    )
    port: int | None = field(
        default=None,
        metadata={"help": "A port for these routes alone, beside the HTTP port; 0 takes a free one. Triton's is 9000."},
    )
    address: str = field(default="", metadata={"help": "The address of that port. Empty: that of the HTTP port."})

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ValueError(f"--openai-port is {self.port}, expected 0 to 65535")
        if self.max_body_bytes < 1:
            raise ValueError(f"--openai-max-body-bytes is {self.max_body_bytes}, expected a number of bytes above 0")
        try:
            ImageHosts(self.image_hosts)
        except ValueError as error:
            raise ValueError(f"--openai-image-hosts: {error}") from None
