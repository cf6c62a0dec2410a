"""An ONNX file without the values of its weights, which are most of it: reading the rest takes a millisecond.

The file is walked field by field, in the wire format of protobuf. Only fields of initializers are left out, never
``external_data``, which names a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace import open_regular

#: Numbers of fields: of a model, of its graph, and of an initializer.
_GRAPH, _INITIALIZER, _EXTERNAL_DATA = 7, 5, 13
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
#: A field of an initializer that is larger has values.
_SMALL_BYTES = 1 << 10
#: Files with more fields, or more bytes besides values, are not walked.
_MOST_FIELDS, _MOST_BYTES = 100_000, 16 << 20
_PIECE_BYTES = 64 << 10
#: The mark of the engine's own format, at byte 4.
_ENGINE_FORMAT = b"ORTM"


class _WireField(NamedTuple):
    """A field from ``start`` to ``end``. ``content`` is where its value begins."""

    number: int
    wire: int
    start: int
    content: int
    end: int


def reduced(path: Path) -> bytes | None:
    """Return the ONNX model in the file ``path`` without the values of its initializers, as bytes of the same message.

    None if it is no such message, or if too much of it is no value of an initializer. Raises what `open_regular`
    raises.
    """
    with open_regular(path) as file:
        reader = _FieldReader(file.fileno(), os.fstat(file.fileno()).st_size)
        try:
            if reader.read(4, 8) == _ENGINE_FORMAT:
                return None
            return b"".join(_model(reader))
        except ValueError:
            return None


def _model(reader: _FieldReader) -> Iterator[bytes]:
    for field in reader.fields(0, reader.size):
        if (field.number, field.wire) == (_GRAPH, _LENGTH):
            yield _written(_GRAPH, b"".join(_graph(reader, field)))
        else:
            yield reader.copy(field)


def _graph(reader: _FieldReader, graph: _WireField) -> Iterator[bytes]:
    for field in reader.fields(graph.content, graph.end):
        is_initializer = (field.number, field.wire) == (_INITIALIZER, _LENGTH)
        if is_initializer and field.end - field.content > _SMALL_BYTES:
            kept = [
                reader.copy(part)
                for part in reader.fields(field.content, field.end)
                if part.number == _EXTERNAL_DATA or part.end - part.start <= _SMALL_BYTES
            ]
            yield _written(_INITIALIZER, b"".join(kept))
        else:
            yield reader.copy(field)


class _FieldReader:
    """Reads a file of ``size`` bytes here and there. Methods raise `ValueError` if it is no message or too much."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._descriptor = descriptor
        self._start, self._piece = 0, b""
        self._fields, self._copied = 0, 0

    def read(self, start: int, end: int) -> bytes:
        offset, size = start - self._start, end - start
        if offset < 0 or offset + size > len(self._piece):
            self._start, self._piece = start, os.pread(self._descriptor, max(size, _PIECE_BYTES), start)
            offset = 0
        found = self._piece[offset : offset + size]
        if len(found) < size:
            raise ValueError("the file is shorter")
        return found

    def copy(self, field: _WireField) -> bytes:
        self._copied += field.end - field.start
        if self._copied > _MOST_BYTES:
            raise ValueError("too many bytes")
        return self.read(field.start, field.end)

    def fields(self, start: int, end: int) -> Iterator[_WireField]:
        """Yield the fields from ``start`` to ``end``."""
        while start < end:
            self._fields += 1
            tag, content = self._varint(start)
            number, wire = tag >> 3, tag & 7
            if wire == _LENGTH:
                size, content = self._varint(content)
                after = content + size
            elif wire == _VARINT:
                _, after = self._varint(content)
            elif wire in (_FIXED32, _FIXED64):
                after = content + (4 if wire == _FIXED32 else 8)
            else:
                raise ValueError("a group")
            if number == 0 or after > end or self._fields > _MOST_FIELDS:
                raise ValueError("no field, or too many")
            yield _WireField(number, wire, start, content, after)
            start = after

    def _varint(self, place: int) -> tuple[int, int]:
        """Return a number and the place behind it."""
        value = 0
        for shift in range(0, 70, 7):
            (byte,) = self.read(place, place + 1)
            place += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, place
        raise ValueError("no number")


def _written(number: int, content: bytes) -> bytes:
    """Return a field with ``content``."""
    size, left = bytearray(), len(content)
    while left > 0x7F:
        size.append(left & 0x7F | 0x80)
        left >>= 7
    size.append(left)
    return bytes((number << 3 | _LENGTH, *size)) + content
