"""The sizes of images, read from their first bytes before llama.cpp decodes them.

llama.cpp decodes images in the process of the server, and allocates what the file says: a PNG of 40 KB may have 50,000
x 50,000 pixels. It also reads audio in the place of an image, so only files that begin as images pass.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any, Final

from headrace import InvalidArgument
from headrace_llm import shown

#: The most images of a request, and their pixels together: about 200 MB of RGB.
MAX_IMAGES, MAX_PIXELS = 64, 1 << 26
#: The beginning of a data URL, and its end before the comma, as llama.cpp reads it.
_IMAGE, _BASE64 = "data:image/", "base64"
#: Markers of a JPEG that have its size: all of C0 to CF but tables, an extension, and arithmetic conditions.
_SIZED: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def check_images(body: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` if ``body``, which is one for llama.cpp, has too many or too large images."""
    pixels = 0
    for number, text in enumerate(_images_in(body), 1):
        if number > MAX_IMAGES:
            raise InvalidArgument(f"the request has more than {MAX_IMAGES} images")
        try:
            file = b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidArgument(f"image {number} is not base64: {error}") from None
        width, height = _size(file)
        if width < 1 or height < 1:
            raise InvalidArgument(f"image {number} cannot be read as PNG, JPEG, GIF or BMP")
        pixels += width * height
        if pixels > MAX_PIXELS:
            raise InvalidArgument(
                f"image {number} has {width} x {height} pixels: the images of a request may have {MAX_PIXELS} together"
            )


def _images_in(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the images of ``body`` as base64."""
    prompt = body.get("prompt")
    if type(prompt) is dict:
        yield from prompt["multimodal_data"]
    for message in body.get("messages", ()):
        content = message.get("content")
        for part in content if type(content) is list else ():
            if part.get("type") == "image_url":
                yield _base64_in(part["image_url"])


def _base64_in(image: Any) -> str:
    url = image.get("url") if type(image) is dict else image
    kind, _, text = url.partition(",") if type(url) is str else ("", "", "")
    if not kind.startswith(_IMAGE) or not kind.endswith(_BASE64):
        raise InvalidArgument(f"an image must be a data: URL of an image with base64, got {shown(url)}")
    return str(text)


def _size(file: bytes) -> tuple[int, int]:
    """Return the width and height of an image; zeros if it is none of a known form."""
    if file.startswith(b"\x89PNG\r\n\x1a\n") and file[12:16] == b"IHDR":
        return _number(file[16:20], "big"), _number(file[20:24], "big")
    if file.startswith((b"GIF87a", b"GIF89a")):
        return _number(file[6:8]), _number(file[8:10])
    if file.startswith(b"BM"):
        if _number(file[14:18]) == 12:
            return _number(file[18:20]), _number(file[20:22])
        return _number(file[18:22]), abs(int.from_bytes(file[22:26], "little", signed=True))
    if file.startswith(b"\xff\xd8"):
        return _jpeg_size(file)
    return 0, 0


def _jpeg_size(file: bytes) -> tuple[int, int]:
    place = 2
    while (place := file.find(b"\xff", place)) >= 0:
        while file[place : place + 1] == b"\xff":
            place += 1
        marker, length = _number(file[place : place + 1]), _number(file[place + 1 : place + 3], "big")
        if marker in _SIZED:
            return _number(file[place + 6 : place + 8], "big"), _number(file[place + 4 : place + 6], "big")
        place += 1 + max(2, length)
    return 0, 0


def _number(data: bytes, order: Any = "little") -> int:
    return int.from_bytes(data, order)
