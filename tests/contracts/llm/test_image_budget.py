"""The bound of the images of a request. The oracle of sizes is Pillow, which opens what it can of damaged files."""

from __future__ import annotations

import base64
import io
import struct
import warnings
from time import thread_time
from typing import Any
from zlib import crc32

import orjson
import pytest
from PIL import Image

from headrace import BytesTensor, InferRequest, InvalidArgument
from headrace_llm import IMAGE_FORMS, MAX_IMAGE_PIXELS, ImageBudget, image_size, images_in, read_generation
from tests.contracts.llm.image_files import file_of, frame_header, mutations, segment, valid_files

JPEG = file_of("JPEG", 40, 30)
GIF = b"GIF89a\x28\0\x1e\0\0\0\0"
FRAME = b",\0\0\0\0\x28\0\x1e\0\0\x08\x01a\0;"


def encoded(*files: bytes) -> list[bytes]:
    return [base64.b64encode(file) for file in files]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc32(kind + data))


def png(*sizes: tuple[int, int]) -> bytes:
    """Return a PNG without pixels, with a header for each size."""
    headers = (chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)) for size in sizes)
    return b"\x89PNG\r\n\x1a\n" + b"".join(headers) + chunk(b"IDAT", b"")


def bmp(width: int, height: int) -> bytes:
    return b"BM" + bytes(8) + struct.pack("<IIiiHHIIIIII", 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def pillow_size(file: bytes) -> tuple[int, int] | None:
    """Return the size by Pillow; None if it refuses the file."""
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(file), formats=IMAGE_FORMS) as image:
            return image.width, image.height
    except Exception:  # it raises what it stumbles over
        return None


def test_sizes_of_valid_files_are_those_of_pillow() -> None:
    for form, file in valid_files():
        assert image_size(file) == pillow_size(file) == (40, 30), form
        assert image_size(file, [each for each in IMAGE_FORMS if each != form]) == (0, 0)


@pytest.mark.filterwarnings("ignore")
def test_no_damaged_file_has_more_pixels_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = refused = 0
    for number, (form, file) in enumerate(mutations(800)):
        # Pillow allocates the canvas of a WEBP when it opens it.
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1 << 26 if form == "WEBP" else None)
        found = pillow_size(file)
        if found is not None:
            width, height = image_size(file)
            opened, refused = opened + 1, refused + (width * height == 0)
            assert width * height in (0, max(width * height, found[0] * found[1])), f"{form} {number}: {found}"
    assert opened > 300
    assert refused < 30


@pytest.mark.parametrize(
    ("file", "size"),
    [
        (png((1, 1), (900, 700)), (900, 700)),
        (png((900, 700), (1, 1)), (900, 700)),
        (JPEG[:2] + frame_header(1, 1) + JPEG[2:], (40, 30)),
        (JPEG[:2] + frame_header(900, 700) + JPEG[2:], (900, 700)),
        (JPEG[:2] + segment(0xE1, frame_header(1, 1)) + JPEG[2:], (40, 30)),
        (JPEG[:2] + b"\xff\xd0" + JPEG[2:], (40, 30)),  # no length follows
        (JPEG[:2] + b"\xff\xff\xff\0ab" + frame_header(900, 700, 0xDE) + JPEG[2:], (900, 700)),
        (JPEG[:2] + b"\xff" * 65_000 + JPEG[2:], (40, 30)),
        (JPEG[:2] + b"\xff" * 66_000 + JPEG[2:], (0, 0)),
        (JPEG[:2] + frame_header(1, 1) + b"\xff" * 65_000 + JPEG[2:], (40, 30)),
        (JPEG[:2] + frame_header(1, 1) + b"\xff" * 66_000 + JPEG[2:], (0, 0)),  # Pillow reads on: 40 x 30
        (GIF + FRAME, (40, 30)),
        (GIF + b",\x0a\0\0\0\x28\0\x2e\0\0\x08\x01a\0;", (50, 46)),
        (GIF + b"!\xfe\0" + b",\0\0\0\0\0\1\0\1\0\x08\x01a\0;", (256, 256)),
        (GIF + b"!\xf9\0" + FRAME, (0, 0)),
        (GIF + b"!\xff\x0bNETSCAPE2.0\0" + FRAME, (0, 0)),
        (GIF + b";", (0, 0)),
        (bmp(40, -30), (40, 30)),
        (bmp(40, -(1 << 31)), (40, 1 << 31)),
        (bmp(1, -(1 << 25)), (1, (1 << 32) - (1 << 25))),  # Pillow reads no sign here
        (bmp(-40, 30), ((1 << 32) - 40, 30)),
        (b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(10) + file_of("WEBP", 40, 30)[12:], (40, 30)),
        (b"RIFF\0\0\0\0WEBPVP8X\x0a" + bytes(7) + b"\x83\3\0\xbb\2\0" + file_of("WEBP", 40, 30)[12:], (900, 700)),
        (b"RIFF\0\0\0\0WAVEfmt ", (0, 0)),
        (file_of("TIFF", 40, 30), (0, 0)),
        (b"", (0, 0)),
    ],
    ids=range(26),
)  # fmt: skip
def test_of_several_sizes_the_largest_counts(file: bytes, size: tuple[int, int]) -> None:
    assert image_size(file) == size


@pytest.mark.parametrize(
    "file",
    [
        b"\xff\xd8" + b"\xff" * (1 << 22),
        b"\xff\xd8\xff" + b"\0\xff" * (1 << 21),
        b"\xff\xd8" + b"\xff\xd0" * (1 << 21),
        b"\xff\xd8" + b"\xff\xe0\0\0" * (1 << 20),
        b"GIF89a" + bytes(1 << 22),
        GIF + b"!\xfe" + b"\1a" * (1 << 21),
        GIF + b"!\xfe\0" * (1 << 20),
        png((1, 1))[:33] + bytes(1 << 22),
        b"RIFF\0\0\0\0WEBPVP8 " + bytes(1 << 22),
        b"RIFF\0\0\0\0WEBPVP8X" + bytes(1 << 22),
    ],
    ids=range(10),
)
def test_headers_without_an_end_are_refused_soon(file: bytes) -> None:
    """Reading all blocks in Python, or reading them again, takes seconds."""
    begin = thread_time()
    image_size(file)
    assert thread_time() - begin < 0.2


def test_the_pixels_of_a_request_are_bounded_together() -> None:
    ImageBudget().take(encoded(png((8192, 4096)), png((8192, 4096))))
    with pytest.raises(
        InvalidArgument,
        match=f"^image 2 has 8192 x 4097 pixels: the images of a request may have {MAX_IMAGE_PIXELS} together, "
        f"and have {MAX_IMAGE_PIXELS + 8192}$",
    ):
        ImageBudget().take(encoded(png((8192, 4096)), png((8192, 4097))))
    budget = ImageBudget()
    budget.take(encoded(png((8192, 4096))))
    with pytest.raises(InvalidArgument, match="video frame 1 has 8192 x 4097 pixels"):
        budget.take(encoded(png((8192, 4097))), "video frame")


@pytest.mark.parametrize(
    ("images", "why"),
    [
        (encoded(*[file_of("PNG", 1, 1)] * 65), "^the request has more than 64 images$"),
        (encoded(b"no image at all"), "^image 1 cannot be read as PNG, JPEG or GIF: it begins with 'no image at all'$"),
        (encoded(JPEG, file_of("BMP", 1, 1)), "^image 2 cannot be read as PNG, JPEG or GIF: it begins with 'BM"),
        (encoded(JPEG[:20]), "image 1 cannot be read"),
        (encoded(png((0, 5))), "image 1 cannot be read"),
        ([b""], "image 1 cannot be read"),
        (["****"], r"^image 1 is not base64: .*; it begins with '\*\*\*\*'$"),
        (["aGk"], "^image 1 is not base64: "),
        (["\u00e9" * 4], "^image 1 is not base64: "),
        ([b"\xff" * (1 << 20)], "^image 1 is not base64: "),
    ],
    ids=range(10),
)
def test_what_is_no_image_is_refused_by_its_number(images: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as refusal:
        ImageBudget(("PNG", "JPEG", "GIF")).take(images)
    assert len(str(refusal.value)) < 300


def collected(*parts: Any, images: list[bytes] | None = None) -> list[bytes | str]:
    messages = orjson.dumps([{"role": "assistant", "content": None}, {"role": "user", "content": parts}])
    given = {"text_input": [b"a"], "image": images} if images else {"messages": [messages]}
    tensors: dict[str, Any] = {name: BytesTensor.from_items(items, (len(items),)) for name, items in given.items()}
    return images_in(read_generation(InferRequest("m", tensors)))


def test_images_are_found_in_the_input_and_in_messages() -> None:
    assert collected(images=[b"YQ==", b"Yg=="]) == [b"YQ==", b"Yg=="]
    assert collected({"type": "text", "text": "a"}, "b") == []
    urls = ["data:image/png;base64,YQ==", "DATA:;base64,Yg=="]
    assert collected(*[{"type": "image_url", "image_url": each} for each in (urls[0], {"url": urls[1]})]) == [
        "YQ==",
        "Yg==",
    ]


@pytest.mark.parametrize(
    "url", ["http://a/", "file:///etc/passwd", "data:image/png,a", "data:image/pngbase64,a", "", 7, None]
)
def test_nothing_is_fetched(url: Any) -> None:
    good = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YQ=="}}
    with pytest.raises(InvalidArgument, match=r"image 2: image_url.url must be a data URL with base64, .* got "):
        collected(good, {"type": "image_url", "image_url": {"url": url}})
