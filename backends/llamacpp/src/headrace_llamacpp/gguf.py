"""The header of a GGUF file: the kind of its model, and a check that the file is complete.

Source: the specification of GGUF, versions 2 and 3, in the repository of ggml. llama.cpp writes its reasons to the log
only. So the errors about a bad file are made here.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace import LoadError

_MAGIC: Final = b"GGUF"
_STRING, _ARRAY = 8, 9
#: The formats of scalars by the number of their type.
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
#: More would be no model: a header is read before its counts are trusted.
_MOST_MEMBERS, _MOST_TENSORS = 1 << 16, 1 << 20


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file. ``members`` has its scalars and strings by name.

    ``arrays`` are the lengths of its arrays. ``longest_token`` is the size in bytes of the longest token; 0 if there
    are no tokens.
    """

    members: Mapping[str, Any]
    arrays: Mapping[str, int]
    longest_token: int

    @property
    def architecture(self) -> str:
        return str(self.members.get("general.architecture", ""))

    def number(self, name: str) -> int:
        """Return the member ``<architecture>.<name>``; 0 if it is missing."""
        value = self.members.get(f"{self.architecture}.{name}", 0)
        return value if type(value) is int else 0

    @property
    def context_length(self) -> int:
        """The tokens of the context that the model was trained with; 0 if unknown."""
        return self.number("context_length")

    @property
    def vocabulary(self) -> int:
        """The number of tokens; 0 if unknown."""
        return self.arrays.get("tokenizer.ggml.tokens", 0)

    @property
    def chat_template(self) -> str:
        return str(self.members.get("tokenizer.chat_template", ""))


def read_header(path: Path) -> GgufHeader:
    """Return the header of the file ``path``. Raises `LoadError` with what is wrong with it. Reads no weights."""
    size = path.stat().st_size
    if size < 24:
        raise LoadError(f"'{path}' is not a GGUF file: it has {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reader = _GgufReader(content)
        if content[:4] != _MAGIC:
            raise LoadError(f"'{path}' is not a GGUF file: it begins with {bytes(content[:4])!r}, expected {_MAGIC!r}")
        try:
            return _read(reader, path, size)
        except (struct.error, IndexError, UnicodeDecodeError):
            raise LoadError(
                f"'{path}' is cut off or damaged: its header does not end within its {size} bytes"
            ) from None


def _read(reader: _GgufReader, path: Path, size: int) -> GgufHeader:
    reader.place = 4
    version, tensors, count = reader.scalar("I"), reader.scalar("Q"), reader.scalar("Q")
    if version not in (2, 3):
        raise LoadError(f"'{path}' has version {version} of GGUF, expected 2 or 3")
    if count > _MOST_MEMBERS or tensors > _MOST_TENSORS:
        raise LoadError(f"'{path}' is damaged: its header announces {count} members and {tensors} tensors")
    members: dict[str, Any] = {}
    arrays: dict[str, int] = {}
    longest = 0
    for _ in range(count):
        name, kind = reader.string(), reader.scalar("I")
        if kind == _ARRAY:
            is_vocabulary = name == "tokenizer.ggml.tokens"
            arrays[name], longest_here = reader.skip_array()
            longest = longest_here if is_vocabulary else longest
        else:
            members[name] = reader.value(kind)
    end = _end_of_tensors(reader, tensors, members)
    if end > size:
        raise LoadError(f"'{path}' is cut off: its tensors need {end} bytes or more, and it has {size}")
    return GgufHeader(members, arrays, longest)


def _end_of_tensors(reader: _GgufReader, tensors: int, members: Mapping[str, Any]) -> int:
    """Return the least size of the file: where its last tensor begins."""
    last = 0
    for _ in range(tensors):
        reader.string()
        axes = reader.scalar("I")
        reader.place += 8 * axes + 4  # the length of each, and the type
        last = max(last, reader.scalar("Q"))
    alignment = members.get("general.alignment", 32)
    alignment = alignment if type(alignment) is int and alignment > 0 else 32
    return -(-reader.place // alignment) * alignment + last + (1 if tensors else 0)


class _GgufReader:
    """Reads little-endian values, one after the other. Raises `struct.error` or `IndexError` at the end."""

    def __init__(self, content: mmap.mmap) -> None:
        self.place = 0
        self._content = content

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._content, self.place)
        self.place += struct.calcsize(form)
        return value

    def string(self) -> str:
        return self._bytes().decode()

    def _bytes(self) -> bytes:
        length = self.scalar("Q")
        self._skip(length)
        return self._content[self.place - length : self.place]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._bytes().decode("utf-8", "replace")
        return self.scalar(_form(kind))

    def skip_array(self) -> tuple[int, int]:
        """Skip an array. Return its length and, for strings, the longest."""
        kind, count = self.scalar("I"), self.scalar("Q")
        longest = 0
        if kind == _STRING:
            for _ in range(count):
                length = self.scalar("Q")
                self._skip(length)
                longest = max(longest, length)
        elif kind == _ARRAY:
            raise IndexError("nested arrays")
        else:
            self._skip(count * struct.calcsize(_form(kind)))
        return count, longest

    def _skip(self, length: int) -> None:
        self.place += length
        if self.place > len(self._content):
            raise IndexError(length)


def _form(kind: int) -> str:
    form = _SCALARS.get(kind)
    if form is None:
        raise IndexError(kind)
    return form
