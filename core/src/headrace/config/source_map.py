"""Finds the field at a line and column of a config's text, and the line and column of a field.

The protobuf parser reports positions; users and the rules of `headrace.config.validation` name fields. `place_at` finds
the field at a position, and `SourceMap` the position of a field. Both scan the text again, and only after an error.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.text_encoding import CUnescape

_TOKEN = re.compile(
    r"""\#[^\n]*
    | "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'?
    | [\w.+-]+
    | [^\s]""",
    re.VERBOSE,
)
#: One step of a path: ``dims``, ``input[0]``, ``inputs['x']``, ``priority_queue_policy[2]``.
_STEP = re.compile(r"""(\w+)(?:\[(\d+|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")\])?""")
_OPENS = frozenset("{<")
_CLOSES = frozenset("}>")
_BEFORE_VALUE = frozenset(":[,")
_MARKS = frozenset(("", *"[]{}<>:,;"))


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A place in the text. ``path`` is ``input[0].dims`` at a value, ``input[0]`` at a field's name; empty at the top.

    ``message`` is the type that contains the place, and ``field`` the field of the value; each is None if unknown.
    ``found`` is the token at the place.
    """

    path: str
    message: Descriptor | None
    field: FieldDescriptor | None
    found: str


@dataclass(slots=True)
class _Block:
    """An open message: its type, if known, its path, and how often each repeated field has occurred so far."""

    message: Descriptor | None
    path: str
    seen: Counter[str] = field(default_factory=Counter)

    def field(self, name: str) -> FieldDescriptor | None:
        return None if self.message is None else self.message.fields_by_name.get(name)

    def child(self, name: str) -> _Block:
        inner = self.field(name)
        return _Block(None if inner is None else inner.message_type, self.enter(name))

    def enter(self, name: str) -> str:
        """Return the path of the next value of field ``name``."""
        inner, path = self.field(name), _join(self.path, name)
        if inner is not None and inner.is_repeated:
            path = f"{path}[{self.seen[name]}]"
            self.seen[name] += 1
        return path


@dataclass(frozen=True, slots=True)
class _Token:
    """One token, ``word``: the name of the field ``name``, or part of its value.

    ``block`` is the message that contains the field, and ``child`` the message that ``word`` opens, if it opens one.
    """

    block: _Block
    name: str
    word: str
    start: int
    is_name: bool = False
    child: _Block | None = None


def place_at(text: str, root: Descriptor, line: int, column: int) -> SourcePlace:
    """Return the place at ``line`` and ``column``, both from 1, of ``text``, a message of type ``root``."""
    target = _offset(text, line, column)
    token = next(token for token in _walk(text, root) if token.start >= target or not token.word)
    name = "" if token.is_name else token.name
    return SourcePlace(_join(token.block.path, name), token.block.message, token.block.field(name), token.word)


class SourceMap:
    """The positions of the fields in ``text``, a message of type ``root`` that the parser has accepted."""

    def __init__(self, text: str, root: Descriptor) -> None:
        self._text = text
        self._root = root
        self._starts: dict[str, int] = {}
        self._entries: dict[tuple[str, str | int], str] = {}
        self._note_all()

    def find(self, path: str) -> tuple[int, int] | None:
        """Return the line and column, from 1, of the value at ``path``; for a message, of its name; for a map entry, of
        its key. For an absent field, return the position of the innermost message around it, or None at the top."""
        start, _ = self._resolve(path)
        if start is None:
            return None
        return self._text.count("\n", 0, start) + 1, start - self._text.rfind("\n", 0, start)

    def holds(self, path: str) -> bool:
        """True if the text has the field at ``path``."""
        return self._resolve(path)[1]

    def _resolve(self, path: str) -> tuple[int | None, bool]:
        """Return the start of the longest part of ``path`` that is in the text, and True if that is all of it."""
        position, at = None, ""
        message: Descriptor | None = self._root
        for name, key in _STEP.findall(path):
            inner = None if message is None else message.fields_by_name.get(name)
            message = None if inner is None else inner.message_type
            at = _join(at, name)
            if key and _is_entry(message):
                at = self._entries.get((at, literal_eval(key)), "") + ".value"
                start = self._starts.get(at.removesuffix("value") + "key")
                message = message.fields_by_name["value"].message_type
            else:
                at = f"{at}[{key}]" if key else at
                start = self._starts.get(at)
            if start is None:
                return position, False
            position = start
        return position, bool(path)

    def _note_all(self) -> None:
        before, named = "", 0
        for token in _walk(self._text, self._root):
            if token.is_name:
                named = token.start
            elif token.child is not None:
                self._note(token, token.child.path, token.start if before in ("[", ",") else named)
            elif token.word == "[":
                self._starts.setdefault(_join(token.block.path, token.name), token.start)
            elif before in _BEFORE_VALUE and token.word not in _MARKS:
                self._note(token, token.block.enter(token.name), token.start)
                self._note_entry(token)
            before = token.word

    def _note(self, token: _Token, path: str, start: int) -> None:
        self._starts[path] = start
        self._starts.setdefault(_join(token.block.path, token.name), start)

    def _note_entry(self, token: _Token) -> None:
        """Store the path of a map entry by its key. If a key occurs twice, the last entry counts."""
        block, word = token.block, token.word
        if token.name == "key" and _is_entry(block.message):
            key = int(word) if word.isdigit() else CUnescape(word[1:-1]).decode("utf-8", "replace")
            self._entries[block.path.rpartition("[")[0], key] = block.path


def _walk(text: str, root: Descriptor) -> Iterator[_Token]:
    """Yield each token of ``text``, and an empty one at the end."""
    blocks, name = [_Block(root, "")], ""
    for match, following in _pairs(text):
        word = match.group()
        is_name = following is not None and following.group() in ":{<[" and (word[0].isalpha() or word[0] == "_")
        name = word if is_name else name
        child = blocks[-1].child(name) if word in _OPENS else None
        yield _Token(blocks[-1], name, word, match.start(), is_name, child)
        if child is not None:
            blocks.append(child)
            name = ""
        elif word in _CLOSES and len(blocks) > 1:
            name = blocks.pop().path.rpartition(".")[2].partition("[")[0]
    yield _Token(blocks[-1], name, "", len(text))


def _pairs(text: str) -> Iterator[tuple[re.Match[str], re.Match[str] | None]]:
    """Yield each token with the next one, without comments."""
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


def _is_entry(message: Descriptor | None) -> TypeGuard[Descriptor]:
    """True if ``message`` is the type of a map entry: a key and a value."""
    return message is not None and bool(message.GetOptions().map_entry)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
