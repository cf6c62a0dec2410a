"""Which field of a config stands at a line and column of its text.

The protobuf parser reports a position; people think in fields. `place_at` walks the text once
more, as far as that position, and only after an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_TOKEN = re.compile(
    r"""\#[^\n]*
    | "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'?
    | [\w.+-]+
    | [^\s]""",
    re.VERBOSE,
)
_OPENS = frozenset("{<")
_CLOSES = frozenset("}>")


@dataclass(frozen=True, slots=True)
class Place:
    """``path`` is ``input[0].dims`` for a value, ``input[0]`` for a field's name; empty at the top.

    ``message`` is what the place belongs to and ``field`` the value's field, both if they are known.
    ``found`` is the token that stands there.
    """

    path: str
    message: Descriptor | None
    field: FieldDescriptor | None
    found: str


@dataclass(slots=True)
class _Block:
    """An open message: its type, if it is known, its path, and what it has held so far."""

    message: Descriptor | None
    path: str
    seen: Counter[str] = field(default_factory=Counter)

    def field(self, name: str) -> FieldDescriptor | None:
        return None if self.message is None else self.message.fields_by_name.get(name)

    def child(self, name: str) -> _Block:
        inner = self.field(name)
        path = _join(self.path, name)
        if inner is None:
            return _Block(None, path)
        if inner.is_repeated:
            path = f"{path}[{self.seen[name]}]"
            self.seen[name] += 1
        return _Block(inner.message_type, path)


def place_at(text: str, root: Descriptor, line: int, column: int) -> Place:
    """The field at ``line`` and ``column``, both from 1, of ``text``, a message of type ``root``."""
    blocks, name = [_Block(root, "")], ""
    target = _offset(text, line, column)
    for token, following in _pairs(text):
        start, word = token.start(), token.group()
        names_field = following is not None and following.group() in ":{<["
        if names_field and (word[0].isalpha() or word[0] == "_"):
            name = "" if start >= target else word
        if start >= target:
            return _place(blocks[-1], name, word)
        if word in _OPENS:
            blocks.append(blocks[-1].child(name))
            name = ""
        elif word in _CLOSES and len(blocks) > 1:
            name = blocks.pop().path.rpartition(".")[2].partition("[")[0]
    return _place(blocks[-1], name, "")


def _place(block: _Block, name: str, found: str) -> Place:
    return Place(_join(block.path, name), block.message, block.field(name), found)


def _pairs(text: str) -> Iterator[tuple[re.Match[str], re.Match[str] | None]]:
    """Each token with the one after it; comments are none."""
    before = None
    for token in _TOKEN.finditer(text):
        if token.group().startswith("#"):
            continue
        if before is not None:
            yield before, token
        before = token
    if before is not None:
        yield before, None


def _offset(text: str, line: int, column: int) -> int:
    start = 0
    for _ in range(line - 1):
        start = text.find("\n", start) + 1
    return start + column - 1


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
