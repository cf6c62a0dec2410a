"""The header of a GGUF file: the kind of its model, and a check that the file is complete.

Source: the specification of GGUF, versions 2 and 3, in the repository of ggml. llama.cpp writes its reasons to the log
only. So the errors about a bad file are made here, with little memory and time for any content of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from headrace import LoadError

_MAGIC: Final = b"GGUF"
_STRING, _ARRAY = 8, 9
_TOKENS: Final = "tokenizer.ggml.tokens"
#: The formats of scalars by the number of their type.
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
#: More would be no model. Files may be sparse: a small one can have all the strings that its header announces.
_MOST_MEMBERS, _MOST_TENSORS, _MOST_AXES = 1 << 16, 1 << 17, 8
_MOST_NUMBERS, _MOST_STRINGS, _MOST_TEXT_BYTES = 1 << 24, 1 << 22, 1 << 26
_BUFFER_BYTES: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file. ``members`` has its scalars and strings by name.

    ``arrays`` are the lengths of its arrays. ``longest_token`` is the size in bytes of the longest token; 0 if there
    are no tokens, which otherwise begin at the byte ``tokens_at``.
    """

    members: Mapping[str, Any]
    arrays: Mapping[str, int]
    longest_token: int
    tokens_at: int = 0

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
        return self.arrays.get(_TOKENS, 0)

    @property
    def has_space_prefix(self) -> bool:
        """True if the tokens are those of SentencePiece, and a text gets a space at its begin, which is taken away."""
        is_sentence_piece = self.members.get("tokenizer.ggml.model") == "llama"
        return is_sentence_piece and self.members.get("tokenizer.ggml.add_space_prefix", True) is True

    @property
    def chat_template(self) -> str:
        return str(self.members.get("tokenizer.chat_template", ""))


def read_header(path: Path) -> GgufHeader:
    """Return the header of the file ``path``. Raises `LoadError` with the reason. Reads no weights."""
    size = path.stat().st_size
    if size < 24:
        raise LoadError(f"'{path}' is not a GGUF file: it has {size} bytes")
    with path.open("rb", _BUFFER_BYTES) as file:  # no map of it: a file that shrinks would end the process
        begin = file.read(4)
        if begin != _MAGIC:
            raise LoadError(f"'{path}' is not a GGUF file: it begins with {begin!r}, expected {_MAGIC!r}")
        try:
            return _read(_GgufReader(file, size), path, size)
        except _Excess as excess:
            raise LoadError(f"'{path}' is damaged: its header announces {excess}") from None
        except (EOFError, UnicodeDecodeError):
            raise LoadError(
                f"'{path}' is cut off or damaged: its header does not end within its {size} bytes"
            ) from None


def read_tokens(path: Path, header: GgufHeader, numbers: Collection[int]) -> dict[int, str]:
    """Return the texts of the tokens ``numbers`` of the file ``path``, which has ``header``."""
    found: dict[int, str] = {}
    last = max((number for number in numbers if 0 <= number < header.vocabulary), default=-1)
    with path.open("rb", _BUFFER_BYTES) as file:
        file.seek(header.tokens_at)
        reader = _GgufReader(file, path.stat().st_size)
        for number in range(last + 1):
            token = reader.bytes()
            if number in numbers:
                found[number] = token.decode("utf-8", "replace")
    return found


def _read(reader: _GgufReader, path: Path, size: int) -> GgufHeader:
    version, tensors, count = reader.scalar("I"), reader.scalar("Q"), reader.scalar("Q")
    if version not in (2, 3):
        raise LoadError(f"'{path}' has version {version} of GGUF, expected 2 or 3")
    if count > _MOST_MEMBERS or tensors > _MOST_TENSORS:
        raise _Excess(f"{count} members and {tensors} tensors, the limits are {_MOST_MEMBERS} and {_MOST_TENSORS}")
    members: dict[str, Any] = {}
    arrays: dict[str, int] = {}
    longest = tokens_at = 0
    for _ in range(count):
        name, kind = reader.bytes().decode(), reader.scalar("I")
        if kind == _ARRAY:
            item, length = reader.scalar("I"), reader.scalar("Q")
            arrays[name] = length
            if name == _TOKENS and item == _STRING:
                tokens_at, longest = reader.place, reader.skip_array(item, length)
            else:
                reader.skip_array(item, length)
        else:
            members[name] = reader.value(kind)
    end = _end_of_tensors(reader, tensors, members)
    if end > size:
        raise LoadError(f"'{path}' is cut off: its tensors need {end} bytes or more, and it has {size}")
    return GgufHeader(members, arrays, longest, tokens_at)


def _end_of_tensors(reader: _GgufReader, tensors: int, members: Mapping[str, Any]) -> int:
    """Return the least size of the file: where its last tensor begins."""
    last = 0
    for _ in range(tensors):
        reader.bytes()
        axes = reader.scalar("I")
        if axes > _MOST_AXES:
            raise _Excess(f"a tensor of {axes} axes, the limit is {_MOST_AXES}")
        reader.skip(8 * axes + 4)  # the length of each, and the type
        last = max(last, reader.scalar("Q"))
    alignment = members.get("general.alignment", 32)
    alignment = alignment if type(alignment) is int and alignment > 0 else 32
    return -(-reader.place // alignment) * alignment + last + (1 if tensors else 0)


class _Excess(Exception):
    """A count or a size beyond all that models have."""


class _GgufReader:
    """Reads little-endian values of ``file`` one after the other. Raises `EOFError` at its end, or `_Excess`.

    ``place`` is that of the next byte.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.place = file.tell()
        self._file, self._size = file, size
        self._strings = self._text_bytes = 0

    def scalar(self, form: str) -> Any:
        read = self._file.read(_SIZES[form])
        if len(read) < _SIZES[form]:
            raise EOFError
        self.place += len(read)
        return struct.unpack(f"<{form}", read)[0]

    def bytes(self) -> bytes:
        """Return the bytes of a string."""
        length = self.scalar("Q")
        if self.place + length > self._size:
            raise EOFError
        self._text_bytes += length
        if self._text_bytes > _MOST_TEXT_BYTES:
            raise _Excess(f"strings of {self._text_bytes} bytes, the limit for all of them is {_MOST_TEXT_BYTES}")
        self.place += length
        return self._file.read(length)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.bytes().decode("utf-8", "replace")
        return self.scalar(_form(kind))

    def skip_array(self, kind: int, count: int) -> int:
        """Skip the items of an array. Return the size of the longest string; 0 for numbers."""
        if kind != _STRING:
            size = count * _SIZES[_form(kind)]
            if self.place + size <= self._size and count > _MOST_NUMBERS:
                raise _Excess(f"an array of {count} numbers, the limit is {_MOST_NUMBERS}")
            self.skip(size)
            return 0
        self._strings += count
        if self.place + 8 * count <= self._size and self._strings > _MOST_STRINGS:
            raise _Excess(f"arrays of {self._strings} strings, the limit is {_MOST_STRINGS}")
        return max((len(self.bytes()) for _ in range(count)), default=0)

    def skip(self, size: int) -> None:
        self.place += size
        if self.place > self._size:
            raise EOFError
        self._file.seek(size, 1)


_SIZES: Final = {form: struct.calcsize(f"<{form}") for form in _SCALARS.values()}


def _form(kind: int) -> str:
    form = _SCALARS.get(kind)
    if form is None:  # an array of arrays, or damage
        raise EOFError
    return form
