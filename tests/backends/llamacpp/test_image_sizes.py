"""Images that are larger than they look: refused before llama.cpp decodes them. The oracle of sizes is Pillow."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from headrace import InvalidArgument
from headrace_llamacpp import image_sizes
from headrace_llamacpp.image_sizes import MAX_IMAGES, check_images


def file_of(kind: str, width: int, height: int, **more: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB" if kind != "GIF" else "P", (width, height)).save(file, kind, **more)
    return file.getvalue()


def chat(*files: bytes, head: str = "data:image/png;base64,") -> dict[str, Any]:
    urls = [head + base64.b64encode(file).decode() for file in files]
    return {"messages": [{"content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]}


def prompt(*files: bytes) -> dict[str, Any]:
    return {"prompt": {"prompt_string": "", "multimodal_data": [base64.b64encode(file).decode() for file in files]}}


@pytest.mark.parametrize("body", [chat, prompt])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True, "comment": b"\xff\xc0\0\x11\x08\0\1\0\1", "icc_profile": b"a" * 99999}),
        ("GIF", {}),
        ("BMP", {}),
    ],
)
def test_the_pixels_of_a_request_are_bounded(
    monkeypatch: pytest.MonkeyPatch, kind: str, more: dict[str, Any], body: Any
) -> None:
    monkeypatch.setattr(image_sizes, "MAX_PIXELS", 90 * 80)
    check_images(body(file_of(kind, 90, 79, **more), file_of(kind, 9, 10, **more)))
    with pytest.raises(InvalidArgument, match="image 2 has 90 x 80 pixels: the images of a request may have 7200"):
        check_images(body(file_of(kind, 1, 1), file_of(kind, 90, 80, **more)))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (chat(b"RIFF\0\0\0\0WAVEfmt "), "image 1 cannot be read as PNG, JPEG, GIF or BMP"),
        (chat(b""), "image 1 cannot be read"),
        (chat(file_of("PNG", 1, 1)[:14]), "image 1 cannot be read"),
        (chat(file_of("JPEG", 1, 1)[:20]), "image 1 cannot be read"),
        (chat(b"\xff\xd8" + b"\xff\xe0\0\0" * 10_000), "image 1 cannot be read"),
        (chat(*[file_of("PNG", 1, 1)] * (MAX_IMAGES + 1)), "more than 64 images"),
        (chat(b"", head="data:image/png,"), "a data: URL of an image with base64"),
        (chat(b"", head="data:image/png;base64,***"), "image 1 is not base64"),
    ],
    ids=range(8),
)
def test_what_is_no_image_is_refused(body: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        check_images(body)


def test_a_request_without_images_passes() -> None:
    check_images({"prompt": "a"})
    check_images({"prompt": [1, 2]})
    check_images({"messages": [{"role": "assistant", "content": None}, {"content": [{"type": "text", "text": "a"}]}]})
