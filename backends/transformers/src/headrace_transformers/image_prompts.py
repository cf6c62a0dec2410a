"""Prompts with images: decoded, and made tokens and tensors by the processor of the model."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from headrace import InvalidArgument, LoadError, one_line
from headrace_llm import GenerationRequest, shown

#: Forms that are decoded; the most images of a request, and their pixels together: about 200 MB of RGB.
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_IMAGES, MAX_PIXELS = 64, 1 << 26
DATA_URL: Final = "data:"


def images_of(request: GenerationRequest) -> Sequence[bytes]:
    """Return the images of ``request`` as base64, in their order. Raises `InvalidArgument` for an address."""
    found = list(request.images)
    named = (part.get("image_url") for part in _parts(request.messages or ()) if part.get("type") == "image_url")
    found += map(_base64_in, named)
    if len(found) > MAX_IMAGES:
        raise InvalidArgument(f"the messages have {len(found)} images, the limit is {MAX_IMAGES}")
    return found


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


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        yield from (part for part in content if type(part) is dict) if type(content) is list else ()


def _base64_in(image: Any) -> bytes:
    url = image.get("url") if type(image) is dict else image
    if type(url) is not str or not url.startswith(DATA_URL) or ";base64," not in url[:200]:
        raise InvalidArgument(f"image_url.url must be a data URL with base64: nothing is fetched; got {shown(url)}")
    return url.partition(",")[2].encode("ascii", "replace")


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

    def decode(self, images: Sequence[bytes]) -> list[Any]:
        """Return ``images``, which are files as base64. Raises `InvalidArgument` with the number of the wrong one."""
        made, pixels = [], 0
        for number, text in enumerate(images, 1):
            try:
                image = self._pillow.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=FORMATS)
                pixels += image.width * image.height
                if pixels <= MAX_PIXELS:
                    made.append(image.convert("RGB"))
            except binascii.Error as error:
                raise InvalidArgument(f"image {number} is not base64: {error}") from None
            except Exception as error:  # a damaged file raises what its decoder stumbles over
                text_of = one_line(str(error))[:200]
                raise InvalidArgument(
                    f"image {number} cannot be read as {', '.join(FORMATS)}: {type(error).__name__}: {text_of}"
                ) from None
            if pixels > MAX_PIXELS:
                raise InvalidArgument(f"the images have more than {MAX_PIXELS} pixels together")
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
