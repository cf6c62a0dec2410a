"""Image files of all forms that are read, and mutations of them. Written by Pillow."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

from PIL import Image


def file_of(form: str, width: int, height: int, mode: str = "RGB", **more: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), 1).save(file, form, **more)
    return file.getvalue()


def segment(marker: int, data: bytes) -> bytes:
    """Return a segment of a JPEG."""
    return bytes((0xFF, marker)) + (len(data) + 2).to_bytes(2, "big") + data


def frame_header(width: int, height: int, marker: int = 0xC0) -> bytes:
    """Return a segment of a JPEG that has its size."""
    data = b"\x08" + height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return segment(marker, data + b"\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01")


def valid_files() -> list[tuple[str, bytes]]:
    """Return files, each of 40 x 30 pixels, after the names of their forms. Some have thumbnails or more frames."""
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "green", "blue")]
    more: dict[str, Any] = {"save_all": True, "append_images": frames[1:]}
    exif = Image.Exif()
    exif[0x010E] = "described"
    thumbnail = b"Exif\0\0" + exif.tobytes()[6:] + file_of("JPEG", 400, 300)
    jpeg = file_of("JPEG", 40, 30)
    return [
        ("PNG", file_of("PNG", 40, 30)),
        ("PNG", file_of("PNG", 40, 30, "P", bits=4)),
        ("PNG", file_of("PNG", 40, 30, **more)),
        ("JPEG", jpeg),
        ("JPEG", file_of("JPEG", 40, 30, "L", progressive=True, icc_profile=b"a" * 99_999)),
        ("JPEG", file_of("JPEG", 40, 30, comment=b"\xff\xc0\0\x11\x08\0\1\0\1")),
        ("JPEG", jpeg[:2] + segment(0xE1, thumbnail) + jpeg[2:]),
        ("JPEG", file_of("MPO", 40, 30, **more)),
        ("GIF", file_of("GIF", 40, 30, "P")),
        ("GIF", file_of("GIF", 40, 30, "P", comment=b"a" * 999, loop=1, save_all=True, append_images=frames[1:])),
        ("BMP", file_of("BMP", 40, 30)),
        ("BMP", file_of("BMP", 40, 30, "P")),
        ("WEBP", file_of("WEBP", 40, 30)),
        ("WEBP", file_of("WEBP", 40, 30, lossless=True)),
        ("WEBP", file_of("WEBP", 40, 30, exif=exif.tobytes())),
        ("WEBP", file_of("WEBP", 40, 30, **more)),
    ]


def mutations(count: int) -> Iterator[tuple[str, bytes]]:
    """Yield ``count`` files with wrong bytes near their beginning, after their forms. They are the same each time."""
    chance, valid = random.Random(7), valid_files()
    for number in range(count):
        form, file = valid[number % len(valid)]
        changed = bytearray(file)
        for _ in range(chance.choice((1, 1, 2, 3))):
            place = chance.randrange(4, min(len(changed), chance.choice((32, 64, 800))))
            match chance.randrange(5):
                case 0:
                    changed[place] = chance.randrange(256)
                case 1:
                    changed[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF))
                case 2:
                    del changed[place : place + chance.randrange(1, 5)]
                case 3:
                    changed[place:place] = chance.randbytes(chance.randrange(1, 5))
                case 4:  # a second header, or what only looks so
                    begin = chance.randrange(min(len(file), 700))
                    changed[place:place] = file[begin : begin + chance.randrange(40)]
        yield form, bytes(changed)
