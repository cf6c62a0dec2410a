"""Reads an ONNX file without the values of its weights, which are most of it. The rest takes a millisecond.

The file is read field by field, in the wire format of protobuf. Only fields of initializers are skipped, except for
``external_data``, which names a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from headrace import open_regular

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
#: Tags of a model's field, a graph's and an initializer's: the number and the wire type.
_GRAPH, _INITIALIZER, _EXTERNAL_DATA = 7 << 3 | _LENGTH, 5 << 3 | _LENGTH, 13 << 3 | _LENGTH
#: A field of an initializer that is larger has values.
_SMALL_BYTES = 1 << 10
#: The limits of a file: its fields, and its bytes besides values.
_MOST_FIELDS, _MOST_BYTES = 100_000, 16 << 20
_PIECE_BYTES = 64 << 10
#: The longest head of a field: two numbers.
_HEAD_BYTES = 20
#: The mark of the engine's own format, at byte 4.
_ENGINE_FORMAT = b"ORTM"

#: The tag of a field, where the field starts, where its value starts, and where both end.
_WireField: TypeAlias = "tuple[int, int, int, int]"


def reduced(path: Path) -> bytes | None:
    """Return the ONNX model in the file ``path`` without the values of its initializers, as bytes of the same message.

    None if the file is no such message, or exceeds a limit. Raises the exceptions of `open_regular`.
    """
    with open_regular(path) as file:
        reader = _FieldReader(file.fileno(), os.fstat(file.fileno()).st_size)
        try:
            if reader.copy(0, 8)[4:] == _ENGINE_FORMAT:
                return None
            return b"".join(_model(reader))
        except ValueError:
            return None


def _model(reader: _FieldReader) -> Iterator[bytes]:
    copied = 0
    for tag, start, content, end in reader.fields(0, reader.size):
        if tag == _GRAPH:
            yield reader.copy(copied, start)
            yield _written(_GRAPH, b"".join(_graph(reader, content, end)))
            copied = end
    yield reader.copy(copied, reader.size)


def _graph(reader: _FieldReader, copied: int, graph_end: int) -> Iterator[bytes]:
    for tag, start, content, end in reader.fields(copied, graph_end):
        if tag == _INITIALIZER and end - content > _SMALL_BYTES:
            yield reader.copy(copied, start)
            parts = [
                reader.copy(part, part_end)
                for part_tag, part, _, part_end in reader.fields(content, end)
                if part_tag == _EXTERNAL_DATA or part_end - part <= _SMALL_BYTES
            ]
            yield _written(_INITIALIZER, b"".join(parts))
            copied = end
    yield reader.copy(copied, graph_end)


class _FieldReader:
    """Reads parts of a file of ``size`` bytes. Methods raise `ValueError` if it is no message or exceeds a limit."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._descriptor = descriptor
        self._start, self._piece = 0, b""
        self._fields, self._copied = 0, 0

    def copy(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end``."""
        size = end - start
        self._copied += size
        if self._copied > _MOST_BYTES:
            raise ValueError("too many bytes")
        at = self._at(start, size)
        found = self._piece[at : at + size]
        if len(found) < size:
            raise ValueError("the file is shorter")
        return found

    def fields(self, start: int, end: int) -> Iterator[_WireField]:
        """Yield the fields from ``start`` to ``end``."""
        while start < end:
            self._fields += 1
            at = self._at(start, min(_HEAD_BYTES, self.size - start))
            piece = self._piece
            tag, at = _number(piece, at)
            wire = tag & 7
            size, content = 0, at
            if wire == _LENGTH:
                size, content = _number(piece, at)
            elif wire == _VARINT:
                size = _number(piece, at)[1] - at
            elif wire in (_FIXED32, _FIXED64):
                size = 4 if wire == _FIXED32 else 8
            else:
                raise ValueError("a group")
            content += self._start
            after = content + size
            if tag < 8 or after > end or self._fields > _MOST_FIELDS:
                raise ValueError("no field, or too many")
            yield tag, start, content, after
            start = after

    def _at(self, start: int, size: int) -> int:
        """Return where ``start`` lies in the piece, which then has the next ``size`` bytes, or all until the end."""
        at = start - self._start
        if at < 0 or at + size > len(self._piece):
            self._start, self._piece = start, os.pread(self._descriptor, max(size, _PIECE_BYTES), start)
            return 0
        return at


def _number(piece: bytes, at: int) -> tuple[int, int]:
    """Return the number at ``at``, and the place behind it."""
    try:
        value = piece[at]
        if value < 0x80:
            return value, at + 1
        value &= 0x7F
        for shift in range(7, 70, 7):
            at += 1
            byte = piece[at]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at + 1
    except IndexError:
        raise ValueError("the file is shorter") from None
    raise ValueError("no number")


def _written(tag: int, content: bytes) -> bytes:
    """Return a field with ``content``."""
    size, left = bytearray(), len(content)
    while left > 0x7F:
        size.append(left & 0x7F | 0x80)
        left >>= 7
    size.append(left)
    return bytes((tag, *size)) + content
