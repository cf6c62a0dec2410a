"""Changes to the files of a model as an attacker, a bad disk or a careless tool makes them: one for each number.

Bytes are turned, cut and moved; in a zip archive it is its members; in a message of protobuf its fields, with the
lengths around them kept right; in a GGUF file the numbers of its header; in text its numbers, words and elements. The
same number makes the same change, wherever it runs.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from tests.attack.model_files.gguf_numbers import gguf_numbers

Files: TypeAlias = "dict[str, bytes]"

#: At the ends of what integers can be, and where sizes and offsets go wrong.
NUMBERS = (0, 1, 2, 7, 64, 127, 255, 65_535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62,
           (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -(1 << 31), -(1 << 63))  # fmt: skip
_PROTOBUF = (".onnx", ".pb", ".graphdef", ".pdmodel")
_NUMBER = re.compile(rb"(?<![\w.])-?\d+(?:\.\d+)?")
_WORD = re.compile(rb"[A-Za-z_][\w./:-]{2,}")
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Mutation:
    """The changed files, and a description of the change."""

    files: Files
    told: str


def mutate(files: Mapping[str, bytes], number: int, words: Sequence[bytes]) -> Mutation:
    """Change one of ``files``. ``words`` are what an attacker would like to have named."""
    random = Random(number)
    name = random.choice(sorted(files))
    changed, told = _Mutator(random, words).change(name, files[name])
    return Mutation({**files, name: changed[:_MOST_BYTES]}, f"{number}: {name}: {told}")


_Change: TypeAlias = "tuple[bytes, str]"


class _Mutator:
    def __init__(self, random: Random, words: Sequence[bytes]) -> None:
        self._random, self._words = random, words

    def change(self, name: str, content: bytes) -> _Change:
        """``content`` of the file ``name``, changed in a way that its kind suggests."""
        if not content:
            return b"\0", "a zero"
        ways: list[Callable[[bytes], _Change]] = [self._bytes]
        if content.startswith(b"PK\3\4"):
            ways += [self._member] * 5 + [self._archive]
        elif name.endswith(_PROTOBUF):
            ways += [self._field] * 5
        elif _is_text(content):
            ways += [self._text] * 6
        elif name.endswith(".safetensors"):
            ways += [self._safetensors] * 4
        elif content.startswith(b"GGUF"):
            ways += [self._gguf] * 5
        return self._random.choice(ways)(content)

    # ------------------------------------------------------------------ bytes

    def _bytes(self, content: bytes) -> _Change:
        random, size = self._random, len(content)
        at = self._place(size)
        kind = random.choice(("turn", "turn", "number", "number", "number", "cut", "remove", "repeat", "zeros", "word"))
        if kind == "turn":
            data = bytearray(content)
            for _ in range(random.choice((1, 1, 2, 8))):
                data[self._place(size)] = random.randrange(256)
            return bytes(data), f"bytes turned near {at}"
        if kind == "number":
            width, at = random.choice(((4, at & ~3), (8, at & ~7), (2, at & ~1)))
            number = random.choice(NUMBERS) & ((1 << 8 * width) - 1)
            return content[:at] + number.to_bytes(width, "little") + content[at + width :], f"{number} at {at}"
        length = random.choice((1, 4, 16, 256))
        if kind == "cut":
            return content[:at], f"cut at {at}"
        if kind == "remove":
            return content[:at] + content[at + length :], f"{length} removed at {at}"
        if kind == "repeat":
            return content[:at] + content[at : at + length] * random.choice((2, 50)) + content[at:], f"repeated at {at}"
        if kind == "zeros":
            return content[:at] + bytes(length) + content[at + length :], f"{length} zeros at {at}"
        return self._word(content)

    def _place(self, size: int) -> int:
        """Where: at the ends more often, which is where files describe themselves."""
        near = min(size, 1024)
        return self._random.choice(
            (self._random.randrange(size), self._random.randrange(near), size - 1 - self._random.randrange(near))
        )

    def _word(self, content: bytes) -> _Change:
        found = list(_WORD.finditer(content))
        if not found:
            return content + self._random.choice(self._words), "a word added"
        there, word = self._random.choice(found), self._random.choice((*self._words, self._random.choice(found)[0]))
        if self._random.random() < 0.5:  # as long as it was, so that all else stays where it is
            word = word[: len(there[0])].ljust(len(there[0]), b"\0")
        return content[: there.start()] + word + content[there.end() :], f"{there[0][:40]!r} -> {word[:40]!r}"

    # ------------------------------------------------------------------ text

    def _text(self, content: bytes) -> _Change:
        random = self._random
        kind = random.choice(("number", "number", "number", "word", "word", "element", "repeat", "deep"))
        numbers = list(_NUMBER.finditer(content))
        if kind == "number" and numbers:
            there, number = random.choice(numbers), str(random.choice(NUMBERS)).encode()
            return content[: there.start()] + number + content[there.end() :], (
                f"{there[0]!r} -> {number!r} behind {content[max(0, there.start() - 40) : there.start()]!r}"
            )
        if kind == "word":
            return self._word(content)
        parts = re.split(rb"(?<=[>\n,}\]])", content)
        index = random.randrange(len(parts))
        if kind == "repeat":
            parts[index] *= random.choice((2, 1000))
        elif kind == "deep":
            parts[index] = random.choice((b"[", b"{", b'{"a":', b"<a>", b"(", b"-")) * random.choice((50, 5000))
        elif random.random() < 0.5:
            del parts[index]
        else:
            other = random.randrange(len(parts))
            parts[index], parts[other] = parts[other], parts[index]
        return b"".join(parts), f"{kind} at element {index}"

    def _safetensors(self, content: bytes) -> _Change:
        """Eight bytes of length, JSON, and the numbers."""
        (length,) = struct.unpack_from("<Q", content)
        head, told = self._text(content[8 : 8 + length])
        return struct.pack("<Q", len(head)) + head + content[8 + length :], told

    def _gguf(self, content: bytes) -> _Change:
        told, at, width = self._random.choice(list(gguf_numbers(content)))
        number = self._random.choice(NUMBERS) & ((1 << 8 * width) - 1)
        return content[:at] + number.to_bytes(width, "little") + content[at + width :], f"{told} is {number}"

    # ------------------------------------------------------------------ archives

    def _member(self, content: bytes) -> _Change:
        members = _unzip(content)
        if not members:
            return self._bytes(content)
        weights = [4 if _is_text(data) or name.endswith((".pkl", "json")) else 1 for name, data in members]
        (index,) = self._random.choices(range(len(members)), weights)
        name, data = members[index]
        changed, told = self.change(name, data)
        members[index] = (name, changed)
        return _zip(members), f"{name}: {told}"

    def _archive(self, content: bytes) -> _Change:
        random, members = self._random, _unzip(content)
        if not members:
            return self._bytes(content)
        index = random.randrange(len(members))
        name, data = members[index]
        kind = random.choice(("drop", "rename", "twice", "swap", "pack"))
        if kind == "drop":
            del members[index]
        elif kind == "rename":
            members[index] = (random.choice(self._words).decode("latin-1")[:4096], data)
        elif kind == "twice":
            members.append((name, random.choice(members)[1]))
        elif kind == "swap":
            members[index] = (name, random.choice(members)[1])
        return _zip(members, zipfile.ZIP_DEFLATED if kind == "pack" else zipfile.ZIP_STORED), f"{kind} '{name}'"

    # ------------------------------------------------------------------ protobuf

    def _field(self, content: bytes) -> _Change:
        fields = _fields(content)
        if not fields:
            return self._bytes(content)
        random = self._random
        index = random.randrange(len(fields))
        number, wire, value = fields[index]
        if wire == _DELIMITED and _fields(value) and random.random() < 0.85:
            inner, told = self._field(value)
            fields[index] = (number, wire, inner)
            return _join(fields), f"{number}.{told}"
        kind = random.choice(("value", "value", "value", "value", "drop", "repeat", "swap", "deep"))
        if kind == "drop":
            del fields[index]
        elif kind == "repeat":
            fields[index:index] = [fields[index]] * random.choice((1, 1000))
        elif kind == "swap":
            fields[index] = (number, wire, random.choice([each for each in fields if each[1] == wire])[2])
        elif kind == "deep" and wire == _DELIMITED:
            for _ in range(random.choice((50, 3000))):
                value = _join([(number, wire, value)])
            fields[index] = (number, wire, value)
        else:
            fields[index] = (number, wire, self._value(wire, value))
        return _join(
            fields
        ), f"{number} {kind} {value[:30]!r} -> {dict(enumerate(fields)).get(index, (0, 0, b''))[2][:40]!r}"

    def _value(self, wire: int, value: bytes) -> bytes:
        random = self._random
        number = random.choice(NUMBERS)
        if wire == _VARINT:
            return _varint(number)
        if wire in _FIXED:
            return (number & ((1 << 8 * _FIXED[wire]) - 1)).to_bytes(_FIXED[wire], "little")
        kind = random.choice(("word", "empty", "half", "twice", "varints", "bytes"))
        if kind == "word":
            return random.choice(self._words)
        if kind == "varints":
            return b"".join(_varint(random.choice(NUMBERS)) for _ in range(random.choice((1, 3, 40))))
        if kind == "bytes" and value:
            return self._bytes(value)[0]
        return b"" if kind == "empty" else value[: len(value) // 2] if kind == "half" else value * 2


def _is_text(content: bytes) -> bool:
    return not re.search(rb"[^\t\n\r -~]", content[:4096])


_VARINT, _DELIMITED = 0, 2
_FIXED = {1: 8, 5: 4}
_Field: TypeAlias = "tuple[int, int, bytes]"


def _fields(content: bytes) -> list[_Field]:
    """Number, wire type and value of each field, if ``content`` is a message; nothing if it is not."""
    found: list[_Field] = []
    at = 0
    while at < len(content):
        key, at = _read_varint(content, at)
        number, wire = key >> 3, key & 7
        if not 0 < number < 1 << 16 or at < 0:
            return []
        start = at
        if wire == _VARINT:
            _, at = _read_varint(content, at)
        elif wire == _DELIMITED:
            size, start = _read_varint(content, at)
            at = start + size if start >= 0 else -1
        elif wire in _FIXED:
            at += _FIXED[wire]
        else:
            return []
        if not 0 <= at <= len(content):
            return []
        found.append((number, wire, content[start:at]))
    return found


def _join(fields: Sequence[_Field]) -> bytes:
    parts = []
    for number, wire, value in fields:
        parts.append(_varint(number << 3 | wire))
        if wire == _DELIMITED:
            parts.append(_varint(len(value)))
        parts.append(value)
    return b"".join(parts)


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    """The number at ``at`` and where it ends; ends at -1 if it does not."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            break
        number |= (content[at] & 127) << shift
        at += 1
        if content[at - 1] < 128:
            return number, at
    return 0, -1


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    low = bytearray()
    while number > 127:
        low.append(number & 127 | 128)
        number >>= 7
    return bytes([*low, number])


def _unzip(content: bytes) -> list[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError):
        return []


def _zip(members: Sequence[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in members:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of names that come twice
                archive.writestr(zipfile.ZipInfo(name), data, compression)
    return stream.getvalue()
