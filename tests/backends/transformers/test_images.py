"""Models that read images, beside transformers' own processor and ``generate`` on the same pixels."""

from __future__ import annotations

import asyncio
import base64
import io
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from headrace import BackendError, InferRequest, InvalidArgument, LoadError
from tests.backends.transformers import tiny_models
from tests.backends.transformers.conftest import Given, Loop, strings
from tests.backends.transformers.test_bad_files import load

#: Older processors take a text with more places than images.
NOT_COUNTED = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24), reason="this processor does not count places"
)
SAMPLING = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def picture(seed: int, width: int = 30, height: int = 20) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def part(data: str, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [{"type": "text", "text": each} if type(each) is str else each for each in parts]}
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> Path:
    path = tmp_path_factory.mktemp("images")
    write_model(path, "text", tiny_models.llama)
    return write_model(path, "see", tiny_models.llava)


@pytest.fixture(scope="module")
def loop(start_server: Callable[..., Loop], folder: Path) -> Loop:
    return start_server(folder.parents[1])


@pytest.fixture(scope="module")
def expect(folder: Path) -> Callable[..., list[int]]:
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()

    def generate(*parts: Any, text: str = "") -> list[int]:
        """The tokens after a chat of texts and images, or after ``text`` with the images."""
        images = [each for each in parts if not isinstance(each, str)]
        content = [
            {"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": each}
            for each in parts
        ]
        if text:
            made = processor(text=[text], images=images or None, return_tensors="pt")
        else:
            made = processor.apply_chat_template(
                [{"role": "user", "content": content}],
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                add_generation_prompt=True,
            )
        tokens = model.generate(**made, do_sample=False, max_new_tokens=12, eos_token_id=-1)
        found: list[int] = tokens[0, made["input_ids"].shape[1] :].tolist()
        return found

    return generate


def test_tokens_after_images_are_those_of_generate(loop: Loop, expect: Callable[..., list[int]]) -> None:
    first, second = picture(0), picture(1, 16, 40)
    chats: list[Sequence[Any]] = [(first, "what?"), ("what?", second), ("a", first, "b", second), ("no image",)]

    async def ask() -> list[Given]:
        sent = [[part(encoded(each)) if isinstance(each, Image.Image) else each for each in parts] for parts in chats]
        return await asyncio.gather(*[loop.ask("see", chat(*parts), sampling=SAMPLING) for parts in sent])

    found = [each.ids for each in loop.run(ask())]
    assert found == [expect(*parts) for parts in chats]
    assert len(set(map(tuple, found))) == 4


def test_the_forms_of_images_are_decoded(loop: Loop, expect: Callable[..., list[int]]) -> None:
    grey = picture(3).convert("L")
    data = encoded(grey, "BMP")
    given = loop.run(loop.ask("see", chat(part(data, "bmp"), "x"), sampling=SAMPLING))
    assert given.ids == expect(grey.convert("RGB"), "x")


def test_an_image_goes_with_a_text_that_has_its_place(loop: Loop, expect: Callable[..., list[int]]) -> None:
    text, image = "see <image> there", picture(5)

    async def ask(text: str) -> Given:
        sent = {
            "text_input": strings(text),
            "image": strings(encoded(image)),
            "sampling_parameters": strings('{"temperature": 0, "max_tokens": 12, "ignore_eos": true}'),
        }
        sent |= {name: np.array([True]) for name in ("return_finish_reason", "return_output_ids", "stream")}  # type: ignore[misc]
        return Given([each async for each in loop.server.engine.responses(InferRequest("see", sent))])

    assert loop.run(ask(text)).ids == expect(image, text=text)
    counted = "the processor of this model refuses this prompt|image tokens do not match"  # the latter until 5.23
    with pytest.raises((InvalidArgument, BackendError), match=counted):
        loop.run(ask("no place"))


def test_a_model_has_the_input_for_images_if_it_reads_them(loop: Loop) -> None:
    inputs = {name: set(loop.server.engine.resolve(name).inputs) for name in ("see", "text")}
    assert inputs["see"] - inputs["text"] == {"image"}


def bomb() -> str:
    """A PNG of 60,000 by 60,000 pixels in a few bytes."""
    head = (60000).to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    made = b"".join(
        len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big") for name, data in chunks
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + made).decode()


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (part("!!"), "image 1 is not base64"),
        (
            part(base64.b64encode(b"no image").decode()),
            "image 1 cannot be read as PNG, JPEG, GIF, BMP or WEBP: it begins with 'no image'",
        ),
        (part(encoded(picture(1))[:400]), "image 1 is damaged, it cannot be decoded|image 1 is not base64"),
        (part(bomb()), "image 1 has 60000 x 60000 pixels: the images of a request may have 67108864 together"),
        (part(encoded(picture(1), "TIFF"), "tiff"), "image 1 cannot be read as PNG"),
        ({"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}, "must be a data URL with base64"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be a data URL with base64"),
        ({"type": "image_url", "image_url": 7}, "must be a data URL with base64.*got 7"),
        ({"type": "video_url", "video_url": {}}, "reads text and images: a message has a part of type 'video_url'"),
        pytest.param("<image>", "the processor of this model refuses this prompt", marks=NOT_COUNTED),
    ],
    ids=range(10),
)
def test_a_wrong_image_is_refused_by_name(loop: Loop, image: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        loop.run(loop.ask("see", chat(image, "x")))


def test_more_images_than_the_limit_are_refused(loop: Loop) -> None:
    with pytest.raises(InvalidArgument, match="the request has more than 64 images"):
        loop.run(loop.ask("see", chat(*[part(encoded(picture(0, 1, 1)))] * 65)))


def test_without_the_settings_of_a_processor_a_model_reads_text_alone(folder: Path, tmp_path: Path) -> None:
    copy = copytree(folder, tmp_path / "1")
    (copy / "processor_config.json").unlink()
    assert "image" not in [each.name for each in load(copy).input]
    (copy / "processor_config.json").write_text("[" * 10**5)
    with pytest.raises(LoadError, match="unable to load model 'm'"):
        load(copy)
