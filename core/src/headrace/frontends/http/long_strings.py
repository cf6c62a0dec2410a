"""A large JSON object, of which the long strings of its ``parameters`` are cut out before it is parsed.

They are the files of a load. To parse one whole would hold the interpreter's lock for a fifth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import InvalidArgument
from headrace.frontends.http.documents import parse, parse_object
from headrace.frontends.http.outline import MAX_REST_BYTES, MAX_VALUES, TOKEN, check_depth, without
from headrace.frontends.http.structure import safe_cuts, windows


class LongString(NamedTuple):
    """The string whose content, as it stands between its quotes, is ``text``, from byte ``at`` of a document on."""

    text: memoryview
    at: int

    def parts(self) -> Iterator[str]:
        """The string, a part at a time. Raises `InvalidArgument` if it is malformed."""
        at = self.at
        for part in safe_cuts(self.text):
            yield parse(memoryview(b'"%s"' % bytes(part)), at - 1)
            at += len(part)


def read_object(body: memoryview) -> dict[str, Any]:
    """`parse_object` for a large ``body``, with a `LongString` for each long member of its ``parameters``.

    Raises `InvalidArgument`, too, if it has more than `MAX_VALUES`, or more than `MAX_REST_BYTES` besides those.
    """
    strings = _long_strings(body)
    spans = [(string.at, string.at + string.text.nbytes) for string in strings]
    rest_bytes = body.nbytes - sum(end - begin for begin, end in spans)
    if rest_bytes > MAX_REST_BYTES:
        raise _deep_or(body, f"{rest_bytes} bytes besides files, the most is {MAX_REST_BYTES}")
    rest = without(body, spans, b"%s%d")
    if sum(map(rest.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise _deep_or(body, f"more than {MAX_VALUES} values")
    document = parse_object(memoryview(rest))
    given = document.get("parameters")
    if type(given) is dict:
        for name, value in given.items():
            if type(value) is str and value.startswith(TOKEN):
                given[name] = strings[int(value[len(TOKEN) :])]
    return document


def _deep_or(body: memoryview, what: str) -> InvalidArgument:
    """That ``body`` is nested too deep or does not end, as of a small document; or else that it has ``what``."""
    for window in windows(body):
        check_depth(window, body)
    return InvalidArgument(f"the JSON of the request has {what}")


def _long_strings(body: memoryview) -> list[LongString]:
    """The strings of ``body`` that fill a window or more."""
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
