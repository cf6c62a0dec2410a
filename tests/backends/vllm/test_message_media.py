"""Addresses, images and videos in messages, before vLLM reads them. Without vLLM; with it: `test_with_engine`."""

from __future__ import annotations

import base64
import io
import struct
import sys
from types import ModuleType
from typing import Any
from zlib import crc32

import pytest
from PIL import Image

from headrace import InvalidArgument, LoadError
from headrace_llm import image_size
from headrace_vllm.prompts import addresses_in, check_media, decode_bounded_forms_only, media_in

AUDIO = b"RIFF\0\0\0\0WAVEfmt "


def test_addresses_are_found_wherever_vllm_would_read_them() -> None:
    messages = [
        {"role": "user", "content": "http://in.a.text/"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/", "detail": "low"}}]},
        {"role": "user", "content": [{"image_url": "file:///b"}, {"type": "text", "text": "url"}]},
        {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGk="}}]},
        {"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "gopher://c"}}]},
    ]
    assert list(addresses_in(messages)) == [
        ("image_url", "http://a/"),
        ("image_url", "file:///b"),
        ("video_url", "data:video/mp4;base64,aGk="),
        ("audio_url", "gopher://c"),
    ]


def png(width: int, height: int) -> str:
    """Return the head of a PNG without its pixels, as base64."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b""))
    made = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc32(kind + data)) for kind, data in chunks]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(made)).decode()


def message(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def media(kind: str, data: str, head: str = "data:image/png;base64,") -> dict[str, Any]:
    return {"type": kind, kind: {"url": head + data}}


LARGE, HALF = png(8192, 8193), png(8192, 4096)
NO_IMAGE = base64.b64encode(AUDIO).decode()


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([media("image_url", HALF), media("image_url", png(8192, 4097))], "image 2 has 8192 x 4097 pixels"),
        ([{"image_url": f"DATA:;base64,{LARGE}"}], "image 1 has 8192 x 8193 pixels"),
        ([media("image_url", LARGE, "data:audio/wav;base64,")], "image 1 has 8192 x 8193 pixels"),
        ([{"type": "text", "uuid": "a", "image_url": f"data:;base64,{LARGE}"}], "image 1 has 8192 x 8193 pixels"),
        ([{"type": "input_image", "image_url": f"data:;base64,{LARGE}"}], "image 1 has 8192 x 8193 pixels"),
        ([media("image_url", NO_IMAGE)], "image 1 cannot be read as PNG, JPEG, GIF, BMP or WEBP: it begins with 'RIFF"),
        ([media("image_url", "*")], "image 1 is not base64"),
        ([media("image_url", png(1, 1))] * 65, "the request has more than 64 images"),
        (
            [media("video_url", f"{png(1, 1)},{LARGE}", "data:VIDEO/jpeg;a=b;base64,")],
            "video frame 2 has 8192 x 8193 pixels",
        ),
        ([media("video_url", LARGE, "data:video/mp4;base64,")], "video 1 has 8192 x 8193 pixels"),
        (
            [media("image_url", HALF), media("video_url", f"{HALF},{HALF}", "data:video/jpeg;base64,")],
            "video frame 2 has",
        ),
    ],
    ids=range(11),
)
def test_what_vllm_would_decode_as_an_image_is_bounded(parts: list[Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        check_media(message(*parts))


def test_other_media_pass() -> None:
    check_media(
        message(
            *[media("image_url", HALF)] * 2,
            media("audio_url", NO_IMAGE, "data:audio/wav;base64,"),
            {"type": "input_audio", "input_audio": {"data": NO_IMAGE, "format": "wav"}},
            media("video_url", NO_IMAGE, "data:video/mp4;base64,"),
            media("video_url", "*", "data:video/mp4;base64,"),
            {"type": "image_url", "image_url": {"url": "http://allowed.example/a.avif"}},
            {"type": "image_url", "image_url": {"url": "data:,a"}},  # vLLM words this error
            {"type": "text", "text": "a", "source": {"url": f"data:text/plain;base64,{NO_IMAGE}"}},
        )
    )
    assert list(media_in(message({"type": "text", "text": "a"}))) == []
    frames = ",".join([png(1, 1)] * 100)
    check_media(message(media("video_url", frames, "data:video/jpeg;base64,")))


def fli_in_jpeg() -> bytes:
    """Return a JPEG of 40 x 30 pixels whose first segment is the header of a FLI of 13,000 x 13,000 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "JPEG")
    header = b"\xff\xd8\xff\xe0\x11\xaf\1\0" + struct.pack("<HHH", 13000, 13000, 8)
    return header.ljust(4 + 0x11AF, b"\0") + file.getvalue()[2:]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Return the reader of images of vLLM 0.32, in short: with the order of its forms, which are ``name``."""
    image: Any = ModuleType("vllm.multimodal.image")
    setattr(image, name, ("AVIF", "BMP", "FLI", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"))
    media: Any = ModuleType("vllm.multimodal.media")

    class ImageMediaIO:
        def load_bytes(self, data: bytes) -> tuple[str | None, int]:
            try:
                with Image.open(io.BytesIO(data), formats=getattr(image, name)) as opened:
                    return opened.format, opened.width
            except OSError as error:
                raise ValueError(f"Failed to load image: {error}") from error

    media.ImageMediaIO = ImageMediaIO
    for module in (image, media):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return ImageMediaIO()


def test_vllm_decodes_no_file_as_a_form_that_is_not_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_images` has vLLM itself."""
    reader = stand_in(monkeypatch, "ALLOWED_IMAGE_FORMATS")
    assert image_size(fli_in_jpeg()) == (40, 30)
    with pytest.warns(Image.DecompressionBombWarning):
        assert reader.load_bytes(fli_in_jpeg()) == ("FLI", 13000)
    decode_bounded_forms_only()
    assert reader.load_bytes(fli_in_jpeg()) == ("JPEG", 40)


def test_a_vllm_whose_forms_cannot_be_bounded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "SERVED_FORMATS")
    with pytest.raises(LoadError, match="decodes images of other forms than PNG, JPEG, GIF, BMP, WEBP"):
        decode_bounded_forms_only()
