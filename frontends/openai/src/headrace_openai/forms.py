"""Forms with files, ``multipart/form-data`` (RFC 7578): read in slices, with bounds on everything but the file."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headrace import InvalidArgument

#: The most parts of a form, and the most bytes of a field that is no file.
MAX_PARTS, MAX_FIELD_BYTES = 64, 64 << 10
#: The length before a file.
LENGTH_BYTES = 4
#: Parsed in one turn of the event loop.
_SLICE_BYTES = 256 << 10


@dataclass(slots=True)
class Form:
    """The fields of a form, each with its last value, and its file.

    ``file`` is its content behind its length, as in a `headrace.BytesTensor`: a large one is never copied as a whole,
    which would hold up the event loop.
    """

    fields: dict[str, str] = field(default_factory=dict)
    file: bytearray | None = None


async def read_form(body: memoryview, headers: Mapping[bytes, bytes], file: str) -> Form:
    """Return the form in ``body``. ``file`` is the name of its one part that may be large.

    Raises `InvalidArgument` if it is no form, if it is broken off, or for a part that breaks a bound.
    """
    kind, options = parse_options_header(headers.get(b"content-type", b""))
    if kind != b"multipart/form-data":
        raise InvalidArgument(f"the Content-Type must be multipart/form-data, got {kind[:100].decode('latin-1')!r}")
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise InvalidArgument("the Content-Type multipart/form-data has no boundary")
    reader = _FormReader(file)
    try:
        parser = MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]  # its TypedDict lists all
        for at in range(0, len(body), _SLICE_BYTES):
            parser.write(bytes(body[at : at + _SLICE_BYTES]))
            await asyncio.sleep(0)
    except FormParserError as error:
        raise InvalidArgument(f"the form can not be read: {error}") from None
    if not reader.is_complete:
        raise InvalidArgument("the form is not complete: its last boundary is missing")
    return reader.form


class _FormReader:
    """Takes the parts of a form from the parser."""

    def __init__(self, file: str) -> None:
        self.form, self.is_complete = Form(), False
        self._file, self._parts = file, 0
        self._header, self._value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._name, self._is_file, self._content = "", False, bytearray()

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin_part,
            "on_header_begin": self._begin_header,
            "on_header_field": self._add_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_content,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidArgument(f"the form has more than {MAX_PARTS} parts")
        self._headers, self._content = {}, bytearray()

    def _begin_header(self) -> None:
        self._header = self._value = b""

    def _add_header(self, data: bytes, begin: int, end: int) -> None:
        self._header += data[begin:end]

    def _add_value(self, data: bytes, begin: int, end: int) -> None:
        self._value += data[begin:end]

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise InvalidArgument("a part of the form has no name: its Content-Disposition must be form-data; name=...")
        self._name = options[b"name"].decode("utf-8", "replace")
        self._is_file = self._name == self._file
        if self._is_file:
            if self.form.file is not None:
                raise InvalidArgument(f"the form has the part '{self._file}' twice")
            self._content = bytearray(LENGTH_BYTES)

    def _add_content(self, data: bytes, begin: int, end: int) -> None:
        self._content += memoryview(data)[begin:end]
        if not self._is_file and len(self._content) > MAX_FIELD_BYTES:
            raise InvalidArgument(f"the field '{self._name[:100]}' of the form has more than {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._is_file:
            self._content[:LENGTH_BYTES] = (len(self._content) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
            self.form.file = self._content
            return
        try:
            value, before = self._content.decode(), self.form.fields.get(self._name)
            is_list = before is not None and self._name.endswith("[]")
            self.form.fields[self._name] = f"{before},{value}" if is_list else value
        except UnicodeDecodeError:
            raise InvalidArgument(f"the field '{self._name[:100]}' of the form is not UTF-8") from None

    def _end(self) -> None:
        self.is_complete = True
