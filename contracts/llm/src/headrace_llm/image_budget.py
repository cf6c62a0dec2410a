"""The images of a request: collected, and bounded in number and pixels before an engine decodes them.

A decoder allocates what a file says: a PNG of 40 KB may have 50,000 x 50,000 pixels. The size is read from the headers
of the file, here without a decoder. Where decoders may read one file in several ways, the largest size counts.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Final

from headrace import InvalidArgument
from headrace_llm.generation_request import MAX_IMAGES, GenerationRequest
from headrace_llm.sampling import shown

#: The forms of images whose sizes are read, by Pillow's names.
IMAGE_FORMS: Final = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
#: The most pixels of the images of a request together: about 200 MB of RGB.
MAX_IMAGE_PIXELS: Final = 1 << 26

#: The most blocks of a file before its pixels. Real files have a few hundred at most.
_MAX_BLOCKS: Final = 1 << 14
#: The most bytes between two segments of a JPEG. A search holds the interpreter: 48 MB of FF would, for 0.5 s.
_MAX_GAP: Final = 1 << 16
#: A marker of a JPEG. Decoders skip other bytes between segments, and repeat the byte FF.
_MARKER: Final = re.compile(rb"\xff([\x01-\xfe])")
#: Markers of a JPEG with its size: all of C0 to CF but tables, an extension and arithmetic conditions; Pillow adds DE.
_SIZED: Final = (frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}) | {0xDE}
#: Markers of a JPEG without a length.
_BARE: Final = frozenset({0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
_START_OF_SCAN: Final = 0xDA

_Size = tuple[int, int]


class ImageBudget:
    """The images of one request, counted. It takes images of ``forms``, which are some of `IMAGE_FORMS`."""

    def __init__(self, forms: Sequence[str] = IMAGE_FORMS) -> None:
        self._forms, self._pixels = tuple(forms), 0

    def take(self, images: Iterable[bytes | str], kind: str = "image", most: int | None = MAX_IMAGES) -> None:
        """Count ``images``, which are files as base64.

        ``most`` is the limit of their number, None for none. Raises `InvalidArgument` with ``kind`` and the number of
        the first image that is not base64, has none of the forms, or exceeds a limit.
        """
        for number, text in enumerate(images, 1):
            name = f"{kind} {number}"
            if most is not None and number > most:
                raise InvalidArgument(f"the request has more than {most} {kind}s")
            try:
                file = b64decode(text, validate=True)
            except (binascii.Error, ValueError) as error:
                raise InvalidArgument(f"{name} is not base64: {error}; it begins with {_start(text)}") from None
            width, height = image_size(file, self._forms)
            if width < 1 or height < 1:
                forms = f"{', '.join(self._forms[:-1])} or {self._forms[-1]}"
                raise InvalidArgument(f"{name} cannot be read as {forms}: it begins with {_start(file)}")
            self._pixels += width * height
            if self._pixels > MAX_IMAGE_PIXELS:
                raise InvalidArgument(
                    f"{name} has {width} x {height} pixels: the images of a request may have {MAX_IMAGE_PIXELS} "
                    f"together, and have {self._pixels}"
                )


def images_in(request: GenerationRequest) -> list[bytes | str]:
    """Return the images of ``request`` as base64: its ``images``, then the parts ``image_url`` of its messages.

    Raises `InvalidArgument` for a part that is not a data URL with base64, such as an address.
    """
    found: list[bytes | str] = list(request.images)
    for part in _parts(request.messages or ()):
        if part.get("type") == "image_url":
            image = part.get("image_url")
            url = image.get("url") if type(image) is dict else image
            text = base64_of(url) if type(url) is str else None
            if text is None:
                raise InvalidArgument(
                    f"image {len(found) + 1}: image_url.url must be a data URL with base64, such as "
                    f"data:image/png;base64,iVBOR...: nothing is fetched; got {shown(url)}"
                )
            found.append(text)
    return found


def base64_of(url: str) -> str | None:
    """Return the base64 in the data URL ``url``; None if it is another URL, or has no base64."""
    head, _, text = url.partition(",")
    return text if head[:5].lower() == "data:" and head.endswith(";base64") else None


def image_size(file: bytes, forms: Sequence[str] = IMAGE_FORMS) -> _Size:
    """Return the width and height of ``file`` in pixels, at least those that a decoder allocates.

    Zeros if it has none of ``forms``, or its headers cannot be read. Only headers are read: the file may be damaged.
    """
    for form, start, read in _READERS:
        if form in forms and start.match(file):
            try:
                return max(read(file, _blocks()), key=_pixels, default=(0, 0))
            except _UnreadableError:
                break
    return 0, 0


class _UnreadableError(Exception):
    """The headers of a file are too many, or decoders would read them in several ways."""


def _parts(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        yield from (part for part in content if type(part) is dict) if type(content) is list else ()


def _start(data: bytes | str) -> str:
    """Return the beginning of ``data`` for the text of an error."""
    return shown(data[:16] if isinstance(data, str) else data[:16].decode("latin-1"))


def _pixels(size: _Size) -> int:
    return size[0] * size[1]


def _blocks() -> Iterator[None]:
    """Yield once for each block of a file that may be read."""
    yield from repeat(None, _MAX_BLOCKS)
    raise _UnreadableError


def _png(file: bytes, blocks: Iterator[None]) -> Iterator[_Size]:
    """Yield the size in each header before the pixels. Decoders differ about a second header."""
    place = 8
    for _ in blocks:
        length, kind = _big(file[place : place + 4]), file[place + 4 : place + 8]
        if kind == b"IHDR":
            yield _big(file[place + 8 : place + 12]), _big(file[place + 12 : place + 16])
        elif kind in (b"IDAT", b""):
            return
        place += 12 + length


def _jpeg(file: bytes, blocks: Iterator[None]) -> Iterator[_Size]:
    """Yield the size in each frame header before the first scan. Segments, such as a thumbnail, are skipped."""
    place = 2
    for _ in blocks:
        found = _MARKER.search(file, place, place + _MAX_GAP)
        if found is None and len(file) - place > _MAX_GAP:
            raise _UnreadableError  # decoders read on, and may find another size
        if found is None or (marker := found[1][0]) == _START_OF_SCAN:
            return
        place = found.end()
        if marker in _BARE:
            continue
        if marker in _SIZED:
            yield _big(file[place + 5 : place + 7]), _big(file[place + 3 : place + 5])
        place += max(2, _big(file[place : place + 2]))


def _gif(file: bytes, blocks: Iterator[None]) -> Iterator[_Size]:
    """Yield the size of the screen, extended by the first frame, as Pillow extends it."""
    width, height = _little(file[6:8]), _little(file[8:10])
    place = 13 + (3 << (file[10] & 7) + 1 if file[10] & 0x80 else 0)  # after the palette
    for _ in blocks:
        kind = file[place : place + 1]
        if kind == b",":
            left, top, right, bottom = (_little(file[place + at : place + at + 2]) for at in (1, 3, 5, 7))
            yield max(width, left + right), max(height, top + bottom)
            return
        if kind in (b";", b""):
            return
        place = _after_extension(file, place, blocks) if kind == b"!" else place + 1


def _after_extension(file: bytes, place: int, blocks: Iterator[None]) -> int:
    """Return the place after the extension of a GIF at ``place``. Its parts end with an empty one."""
    sizes, is_comment = [], file[place + 1 : place + 2] == b"\xfe"
    is_loop = file[place + 3 : place + 14] == b"NETSCAPE2.0"
    place += 2
    for _ in blocks:
        size = _little(file[place : place + 1])
        sizes.append(size)
        place += 1 + size
        if not size:
            break
    if (len(sizes) == 1 and not is_comment) or (len(sizes) == 2 and is_loop):
        raise _UnreadableError  # Pillow reads on after such an end, others do not
    return place


def _bmp(file: bytes, _: Iterator[None]) -> Iterator[_Size]:
    header = _little(file[14:18])
    if header == 12:
        yield _little(file[18:20]), _little(file[20:22])
    elif header in (40, 52, 56, 64, 108, 124):
        height = _little(file[22:26])  # negative if the first row is the top one; as in Pillow, only if it begins FF
        yield _little(file[18:22]), (1 << 32) - height if file[25:26] == b"\xff" else height


def _webp(file: bytes, blocks: Iterator[None]) -> Iterator[_Size]:
    """Yield the size of the canvas, of the first frame, and of the pixels in it."""
    place = 12
    for _ in blocks:
        kind, length, data = file[place : place + 4], _little(file[place + 4 : place + 8]), place + 8
        if kind == b"VP8X":
            yield _little(file[data + 4 : data + 7]) + 1, _little(file[data + 7 : data + 10]) + 1
        elif kind == b"ANMF":
            yield _little(file[data + 6 : data + 9]) + 1, _little(file[data + 9 : data + 12]) + 1
            length = 16  # its chunks follow
        elif kind == b"VP8 ":
            if file[data + 3 : data + 6] == b"\x9d\x01\x2a":
                yield _little(file[data + 6 : data + 8]) & 0x3FFF, _little(file[data + 8 : data + 10]) & 0x3FFF
            return
        elif kind == b"VP8L":
            if file[data : data + 1] == b"\x2f":
                bits = _little(file[data + 1 : data + 5])
                yield (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
            return
        elif not kind:
            return
        place = data + length + (length & 1)


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


#: By form: the bytes at the beginning, and the reader of sizes.
_READERS: Final[Sequence[tuple[str, re.Pattern[bytes], Callable[[bytes, Iterator[None]], Iterator[_Size]]]]] = (
    ("PNG", re.compile(rb"\x89PNG\r\n\x1a\n....IHDR", re.DOTALL), _png),
    ("JPEG", re.compile(rb"\xff\xd8\xff"), _jpeg),
    ("GIF", re.compile(rb"GIF8[79]a.{7}", re.DOTALL), _gif),
    ("BMP", re.compile(rb"BM"), _bmp),
    ("WEBP", re.compile(rb"RIFF....WEBPVP8[ LX]", re.DOTALL), _webp),
)
