"""Prompts with images: decoded, and made tokens and tensors by the processor of the model."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from headrace import InvalidArgument, LoadError, one_line
from headrace_llm import IMAGE_FORMS, ImageBudget, shown


def for_template(content: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the parts of a message as templates expect them: texts, and the places of images."""
    made = []
    for part in content:
        kind = part.get("type") if type(part) is dict else part
        if kind == "text" and type(part.get("text")) is str:
            made.append({"type": "text", "text": part["text"]})
        elif kind == "image_url":
            made.append({"type": "image"})
        else:
            raise InvalidArgument(f"this model reads text and images: a message has a part of type {shown(kind)}")
    return made


class ImagePrompts:
    """Makes the inputs of a model that reads images. Any thread."""

    def __init__(self, processor: Any) -> None:
        try:
            from PIL import Image
        except ImportError as error:
            raise LoadError(
                f"models that read images need the package pillow ({error}); run: pip install "
                "'headrace-transformers[images]'"
            ) from error
        self._pillow: Any = Image
        self._processor = processor
        self._bos: str = getattr(processor.tokenizer, "bos_token", None) or ""

    @property
    def template(self) -> Any:
        """The chat template of the processor, or else of its tokenizer."""
        return getattr(self._processor, "chat_template", None) or self._processor.tokenizer.chat_template

    def decode(self, images: Sequence[bytes | str]) -> list[Any]:
        """Return ``images``, which are files as base64. Raises `InvalidArgument` with the number of the wrong one."""
        ImageBudget().take(images)
        made = []
        for number, text in enumerate(images, 1):
            try:
                image = self._pillow.open(io.BytesIO(base64.b64decode(text)), formats=IMAGE_FORMS)
                made.append(image.convert("RGB"))
            except Exception as error:  # a damaged file raises what its decoder stumbles over
                text_of = one_line(str(error))[:200]
                raise InvalidArgument(
                    f"image {number} is damaged, it cannot be decoded: {type(error).__name__}: {text_of}"
                ) from None
        return made

    def read(self, text: str, images: Sequence[Any]) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens of ``text``, and the tensors beside them for the model.

        Raises `InvalidArgument`, such as for a text with fewer places for images than there are.
        """
        has_bos = self._bos != "" and text.startswith(self._bos)  # as in transformers' apply_chat_template
        try:
            made = self._processor(
                text=[text], images=list(images) or None, return_tensors="pt", add_special_tokens=not has_bos
            )
        except Exception as error:
            reason = one_line(" ".join(str(error).split()))[:300]
            raise InvalidArgument(f"the processor of this model refuses this prompt: {reason}") from error
        tensors = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
        return made["input_ids"][0].tolist(), tensors
