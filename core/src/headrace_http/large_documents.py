"""Large JSON documents: long parts are cut out before the rest is parsed.

Parsing such a document whole would hold the interpreter's lock for as long, and create an object per number. From an
infer request, the arrays of tensors are cut out and read later, in `Pieces` between commas (`read_document`). From a
load, the strings of files are (`read_object`). The rest of the document is small.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import InvalidArgument
from headrace.off_loop import SLICE_BYTES
from headrace_http.documents import MAX_DEPTH, checked, parse, parse_object, too_deep, unreadable
from headrace_http.structure import Window, blank_strings, is_complete, safe_cuts, windows

#: The nesting of ``data``: the document, ``inputs`` and its entry.
_DATA_DEPTH = 3
#: The maximum nesting that the parser follows.
_PARSED_DEPTH = 1024
_BLANKS = b" \t\n\r"
_ARRAY = ord("[")
#: Tables for `bytes.translate`: one turns everything except brackets and commas into zeros; one brackets into blanks.
_KINDS = bytes(byte if byte in b"[]," else ord("0") for byte in range(256))
_WITHOUT_BRACKETS = bytes.maketrans(b"[]", b"  ")
#: Pairs that do not occur in a valid array.
_MISPLACED = (b",]", b"[,", b"][", b"]0", b"0[")
#: Arrays below this size are not cut out.
_SHORT_BYTES = 256
#: A longer piece consists of one long string.
_LONG_PIECE_BYTES = 3 * SLICE_BYTES
#: At most this many values besides tensors, because each becomes an object. No valid request has as many.
MAX_VALUES = 64 * 1024
#: At most this many bytes besides tensors, because they are parsed in one piece. No valid request has as many.
MAX_REST_BYTES = 4 << 20
#: The placeholder of a part that was cut out, before its number. Random, so that callers cannot use it.
_TOKEN = os.urandom(12).hex()


class Pieces(NamedTuple):
    """An array, ``body[begin:end]``, and the commas at which it is cut."""

    body: memoryview
    begin: int
    end: int
    cuts: list[int]
    is_deep: bool

    def read(self) -> Iterator[list[Any]]:
        """Yield the values of the array and of all arrays in it, in order, one piece at a time.

        Raises `InvalidArgument`: malformed, nested too deep, or with an empty array in it.
        """
        if self.is_deep:
            raise too_deep()
        begin = self.begin
        for at in (*self.cuts, self.end):
            yield _text(self.body, begin, at) if at - begin > _LONG_PIECE_BYTES else _values(self.body, begin, at)
            begin = at + 1

    def check(self) -> None:
        """Raise the same as `read`."""
        for _ in self.read():
            pass


class LongString(NamedTuple):
    """A string: ``text`` is its content between the quotes, ``at`` its position in the document."""

    text: memoryview
    at: int

    def parts(self) -> Iterator[str]:
        """Yield the string in parts. Raises `InvalidArgument` if it is malformed."""
        at = self.at
        for part in safe_cuts(self.text):
            yield parse(memoryview(b'"%s"' % bytes(part)), at - 1)
            at += len(part)


def read_document(body: memoryview) -> Any:
    """Return the document in ``body``, with `Pieces` in place of the long ``data`` of its ``inputs``.

    Raises `InvalidArgument` if the text is malformed or too deep, or if there are more than `MAX_VALUES`, or more
    than `MAX_REST_BYTES` besides tensors.
    """
    arrays = _arrays(body)
    document = _parse_rest(body, arrays)
    entries = _entries_of(document)
    if len(entries) < len(arrays):  # others are at the same depth, such as the content of a message
        arrays = [array for number, array in enumerate(arrays) if number in entries]
        document = _parse_rest(body, arrays)
        entries = _entries_of(document)
    for number, entry in entries.items():
        entry["data"] = arrays[number]
    return document


def read_object(body: memoryview) -> dict[str, Any]:
    """`parse_object` for a large ``body``, with a `LongString` for each long member of its ``parameters``.

    Also raises `InvalidArgument` for more than `MAX_VALUES`, or more than `MAX_REST_BYTES` besides these.
    """
    strings = _long_strings(body)
    spans = [(string.at, string.at + string.text.nbytes) for string in strings]
    rest_bytes = body.nbytes - sum(end - begin for begin, end in spans)
    if rest_bytes > MAX_REST_BYTES:
        _check_depth(body)
        raise _too_much_besides("files", rest_bytes)
    rest = _without(body, spans, b"%s%d")
    if _has_too_many_values(rest):
        _check_depth(body)
        raise _too_many_values()
    document = parse_object(memoryview(rest))
    given = document.get("parameters")
    if type(given) is dict:
        for name, value in given.items():
            if type(value) is str and value.startswith(_TOKEN):
                given[name] = strings[int(value[len(_TOKEN) :])]
    return document


def read_texts(body: memoryview) -> Any:
    """Return the document in ``body``, whose strings may be long.

    Raises `InvalidArgument` if it is malformed, too deep, or if there are more than `MAX_VALUES`, or more than
    `MAX_REST_BYTES` besides strings that fill a window.
    """
    strings = _long_strings(body)
    if not strings and body.nbytes <= MAX_REST_BYTES:
        return checked(parse(body))
    spans = [(string.at, string.at + string.text.nbytes) for string in strings]
    rest_bytes = body.nbytes - sum(end - begin for begin, end in spans)
    if rest_bytes > MAX_REST_BYTES:
        raise _too_much_besides("long strings", rest_bytes)
    rest = _without(body, spans, b"%s%d")
    if _has_too_many_values(rest):
        raise _too_many_values()
    root = [checked(parse(memoryview(rest)))]
    _put_back(root, ["".join(string.parts()) for string in strings])
    return root[0]


def _put_back(root: list[Any], strings: list[str]) -> None:
    """Replace the placeholders in ``root`` by ``strings``."""
    containers: list[Any] = [root]
    while containers:
        container = containers.pop()
        for key, value in container.items() if type(container) is dict else enumerate(container):
            if type(key) is str and key.startswith(_TOKEN):
                raise InvalidArgument("the JSON of the request has a member whose name is too long")
            if type(value) is str:
                if value.startswith(_TOKEN):
                    container[key] = strings[int(value[len(_TOKEN) :])]
            elif type(value) in (dict, list):
                containers.append(value)


def _has_too_many_values(rest: bytes) -> bool:
    return len(rest) > MAX_VALUES and sum(map(rest.count, (b",", b"[", b"{"))) > MAX_VALUES


def _too_many_values(what: str = "") -> InvalidArgument:
    return InvalidArgument(f"the JSON of the request has more than {MAX_VALUES} values{what}")


def _too_much_besides(what: str, size_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"the JSON of the request has {size_bytes} bytes besides {what}, the most is {MAX_REST_BYTES}"
    )


def _check_depth(body: memoryview) -> None:
    """Raise if the document is nested too deep or incomplete, in the order of a small document."""
    for window in windows(body):
        _depth_of(window, body)


def _values(body: memoryview, begin: int, end: int) -> list[Any]:
    piece = bytes(body[begin:end])
    if b"[" in piece or b"]" in piece:
        piece = _without_brackets(piece, begin)
    leaves: list[Any] = parse(memoryview(b"[%s]" % piece), begin - 1)
    if not leaves:
        raise unreadable("unexpected comma", begin)
    return leaves


def _text(body: memoryview, begin: int, end: int) -> list[Any]:
    """Return the one long string of a piece, parsed in parts."""
    head = bytes(body[begin : begin + SLICE_BYTES]).partition(b'"')[0]
    tail = bytes(body[end - SLICE_BYTES : end]).rpartition(b'"')[2]
    if max(len(head), len(tail)) >= SLICE_BYTES:  # not a string, or endless blanks
        raise unreadable("number or blanks without end", begin)
    parse(memoryview(b"[%s]" % _without_brackets(head + b"0" + tail, begin)), begin)
    parts = [
        parse(memoryview(b'"%s"' % bytes(part)), begin)
        for part in safe_cuts(body[begin + len(head) + 1 : end - len(tail) - 1])
    ]
    return ["".join(parts)]


def _without_brackets(piece: bytes, at: int) -> bytes:
    """Return ``piece`` with blanks for its brackets. Raises `InvalidArgument` if a bracket is misplaced."""
    shown = blank_strings(memoryview(piece)) if b'"' in piece else piece
    kinds = shown.translate(_KINDS, _BLANKS)
    if b"[]" in kinds:
        raise InvalidArgument("the 'data' of an input has an empty array, which is not read in a request of this size")
    if kinds[:1] == b"]" or kinds[-1:] == b"[" or any(map(kinds.__contains__, _MISPLACED)):
        raise unreadable("misplaced bracket or comma", at)
    if shown is piece:
        return piece.translate(_WITHOUT_BRACKETS)
    content, flags = np.frombuffer(bytearray(piece), np.uint8), np.frombuffer(shown, np.uint8)
    content[(flags == ord("[")) | (flags == ord("]"))] = ord(" ")
    return content.tobytes()


def _without(body: memoryview, spans: list[tuple[int, int]], mark: bytes) -> bytes:
    """Return ``body`` with ``mark``, completed by `_TOKEN` and a number, in place of each of ``spans``."""
    parts, end = list[bytes | memoryview](), 0
    for number, (begin, behind) in enumerate(spans):
        parts += (body[end:begin], mark % (_TOKEN.encode(), number))
        end = behind
    return b"".join((*parts, body[end:]))


def _depth_of(window: Window, body: memoryview) -> int:
    """Return the depth of ``window`` of ``body``. Raises `InvalidArgument` if that is too deep for the parser."""
    deepest = int(window.depth.max())
    if deepest > _PARSED_DEPTH:
        raise too_deep() if is_complete(body) else unreadable("Invalid value.", body.nbytes)
    return deepest


def _parse_rest(body: memoryview, arrays: list[Pieces]) -> Any:
    """Return the document in ``body``, with a placeholder in place of each of ``arrays``."""
    rest_bytes = body.nbytes - sum(array.end - array.begin for array in arrays)
    if rest_bytes > MAX_REST_BYTES:
        raise _too_much_besides("tensors", rest_bytes)
    rest = _without(body, [(array.begin, array.end) for array in arrays], b'["%s%d"]')
    if _has_too_many_values(rest):
        raise _too_many_values(" besides tensors")
    return parse(memoryview(rest))


def _entries_of(document: Any) -> dict[int, dict[str, Any]]:
    """Return the ``inputs`` of ``document`` whose ``data`` was cut out, by the number of their placeholder."""
    entries = document.get("inputs") if type(document) is dict else None
    found: dict[int, dict[str, Any]] = {}
    for entry in entries if type(entries) is list else ():
        data = entry.get("data") if type(entry) is dict else None
        if type(data) is list and len(data) == 1 and type(data[0]) is str and data[0].startswith(_TOKEN):
            found[int(data[0][len(_TOKEN) :])] = entry
    return found


def _arrays(body: memoryview) -> list[Pieces]:
    """Return the arrays of at least `_SHORT_BYTES` at the place of an input's ``data``."""
    arrays, open_array = list[Pieces](), _Open(-1)
    for window in windows(body):
        deepest = _depth_of(window, body)
        opened, closed = (window.at + places for places in window.crossings(_DATA_DEPTH))
        open_array.is_deep |= deepest >= _DATA_DEPTH + MAX_DEPTH
        if open_array.begin >= 0:
            opened = np.append(open_array.begin, opened)
        whole = min(len(opened), len(closed))
        ends = closed[:whole] + 1
        for place in np.flatnonzero(ends - opened[:whole] >= _SHORT_BYTES).tolist():
            begin = int(opened[place])
            found = open_array if begin == open_array.begin else _Open(begin, deepest >= _DATA_DEPTH + MAX_DEPTH)
            found.close(window, int(ends[place]))
            if body[begin] == _ARRAY:
                arrays.append(Pieces(body, begin, int(ends[place]), found.cuts, found.is_deep))
        if whole < len(opened):
            begin = int(opened[-1])
            if begin != open_array.begin:
                open_array = _Open(begin, deepest >= _DATA_DEPTH + MAX_DEPTH)
            open_array.cut(window)
        elif whole:
            open_array = _Open(-1)
    return arrays


class _Open:
    """An array whose end is not reached yet."""

    def __init__(self, begin: int, is_deep: bool = False) -> None:
        self.begin = begin
        self.is_deep = is_deep
        self.cuts: list[int] = []
        self._was_without = False

    def cut(self, window: Window) -> None:
        """Cut the array, which does not end in ``window``, at the last comma there."""
        begin = max(self.begin - window.at, 0)
        at = window.last_comma(begin)
        if at < 0:
            self._was_without = True
            return
        self.close(window, window.at + at)
        if not self.cuts or self.cuts[-1] < window.at + at:
            self.cuts.append(window.at + at)

    def close(self, window: Window, end: int) -> None:
        """End a piece that had no comma for a whole window: cut at the first comma before ``end``."""
        if self._was_without:
            at = window.at + window.first_comma(max(self.begin - window.at, 0))
            if window.at <= at < end:
                self.cuts.append(at)
            self._was_without = False


def _long_strings(body: memoryview) -> list[LongString]:
    """Return the strings of ``body`` that fill a window or more."""
    found, begin, is_long = list[LongString](), -1, False
    for window in windows(body):
        inside = window.inside
        if begin >= 0:
            if inside.all():
                is_long = True
                continue
            if is_long:
                found.append(LongString(body[begin : window.at + int(np.argmin(inside))], begin))
        outside = np.flatnonzero(~inside)
        begin = window.at + int(outside[-1]) + 2 if inside[-1] and len(outside) else window.at + 1 if inside[-1] else -1
        is_long = False
    return found
