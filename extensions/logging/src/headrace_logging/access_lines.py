"""Formats many lines of the access log at once, from the records of operations.

Callers choose ids, model names and addresses. So a text of only letters, digits and a few signs is written unchanged,
and any other text as a JSON string in ASCII: no caller can end a line, add a field, or write to a terminal.

The common part of lines, such as caller, model and status, is a cached template. The templates of all lines are joined
and filled by one ``%``, so that nearly all work is done in C.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby, repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from headrace import Code, FinishedInference

#: The maximum characters of a text of a caller.
LONGEST = 256
#: The maximum number of cached templates. Callers choose parts of them.
_MAX_TEMPLATES = 1024
_SIGNS = "_.:/@+-"
_PLAIN = re.compile(rf"[A-Za-z0-9{_SIGNS}]+").fullmatch
_PLAIN_BYTES = bytes(sorted({*range(48, 58), *range(65, 91), *range(97, 123), *_SIGNS.encode()}))
#: ``traceparent`` of https://www.w3.org/TR/trace-context/.
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}").match
_NO_TIMES = (0, 0, 0, 0)
#: The place of a value that is left out.
_NONE = "%.0s"


class Access(NamedTuple):
    """An operation that is over.

    Without the ``version`` of ``finished``, it was refused before it was read; without ``times``, no instance has
    executed it.
    """

    finished: FinishedInference
    operation: str
    #: The number of its responses.
    responses: int


class _Common(NamedTuple):
    """The fields that a template contains."""

    transport: str
    operation: str
    peer: str
    principal: str
    model: str
    version: int
    code: Code | None
    has_id: bool
    has_trace: bool
    has_times: bool

    @property
    def texts(self) -> Mapping[str, str]:
        named = {"peer": self.peer, "principal": self.principal, "model": self.model}
        return {name: value for name, value in named.items() if value}

    @property
    def status(self) -> str:
        return "ok" if self.code is None else self.code.value


_Key: TypeAlias = "tuple[str, str, str, str, str, int, Code | None, bool, bool, bool]"


class _Templates(dict[_Key, str]):
    def __init__(self, make: Callable[[_Common], str]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: _Key) -> str:
        if len(self) >= _MAX_TEMPLATES:
            self.clear()
        self[key] = made = self._make(_Common(*key))
        return made


class TextLines:
    """Lines of fields ``name=value`` with blanks between them. A field that is not known is left out."""

    def __init__(self) -> None:
        self._templates = _Templates(self._template)

    def lines(self, records: Iterable[tuple[Any, ...]], since_epoch_ns: int) -> str:
        """Return a line with its newline for each of ``records``, which are `Access`, or the plain tuple of a
        `FinishedInference`. ``since_epoch_ns`` is the wall clock minus the monotonic one."""
        return "".join([self._alike(tuple(alike), since_epoch_ns) for _, alike in groupby(records, len)])

    def _alike(self, records: Sequence[tuple[Any, ...]], since_epoch_ns: int) -> str:
        """Return the lines of ``records`` of one kind."""
        more: Sequence[Iterable[Any]] = ()
        if isinstance(records[0], Access):
            records, *more = zip(*records, strict=True)
        (arrivals, transports, peers, principals, contexts, models, versions, ids, request_bytes, codes, response_bytes,
         ends, queued, times) = zip(*records, strict=True)  # fmt: skip
        one_each = [int(code is None) for code in codes] if any(codes) else repeat(1, len(records))
        operations, responses = more or (repeat("infer", len(records)), one_each)
        traces = [_trace_id(context) for context in contexts] if any(contexts) else contexts
        known = [each or _NO_TIMES for each in times] if None in times else times
        starts, _, _, returns = np.array(known, np.int64).T
        ended = np.array(ends, np.int64)
        seconds, micros = np.divmod((ended + since_epoch_ns) // 1000, 1_000_000)
        keys = zip(
            transports, operations, peers, principals, models, versions, codes, map(bool, ids), map(bool, traces),
            map(bool, times), strict=True,
        )  # fmt: skip
        values = zip(
            map(second, seconds.tolist()),
            micros.tolist(),
            ((ended - np.array(arrivals, np.int64)) // 1000).tolist(),
            ids if _are_plain(ids) else map(self._word, ids),
            request_bytes,
            response_bytes,
            responses,
            ((starts - np.array(queued, np.int64)) // 1000).tolist(),
            ((returns - starts) // 1000).tolist(),
            traces,
            strict=True,
        )
        filled: str = "".join(map(self._templates.__getitem__, keys)) % tuple(chain.from_iterable(values))
        return filled

    @staticmethod
    def dropped_line(dropped: int) -> str:
        """Return the line with the number of dropped records."""
        return f"# {dropped} records were dropped\n"

    @staticmethod
    def _word(text: str) -> str:
        return word(text)

    @staticmethod
    def _template(common: _Common) -> str:
        """Return the line of a record with ``common``, with places for the values of `lines`."""
        named = "".join([f" {name}={word(value)}" for name, value in common.texts.items()])
        start = f"{word(common.transport)} {word(common.operation)} status={word(common.status)}"
        name = " id=%s" if common.has_id else _NONE
        read = f" version={common.version}{name} request_bytes=%d response_bytes=%d responses=%d"
        times = " queue_us=%d compute_us=%d" if common.has_times else _NONE * 2
        trace = " trace=%s" if common.has_trace else _NONE
        known = read if common.version else _NONE * 4
        return f"%s.%06dZ {_constant(start)} duration_us=%d{_constant(named)}{known}{times}{trace}\n"


class JsonLines(TextLines):
    """Lines that are JSON objects, in ASCII. A member that is not known is left out."""

    @staticmethod
    def dropped_line(dropped: int) -> str:
        return f'{{"dropped":{dropped}}}\n'

    @staticmethod
    def _word(text: str) -> str:
        return quoted(text)[1:-1]

    @staticmethod
    def _template(common: _Common) -> str:
        named = {
            "transport": common.transport, "operation": common.operation, "status": common.status, **common.texts
        }  # fmt: skip
        members = "".join([f',"{name}":{quoted(value)}' for name, value in named.items()])
        name = ',"request_id":"%s"' if common.has_id else _NONE
        read = f',"version":"{common.version}"{name},"request_bytes":%d,"response_bytes":%d,"responses":%d'
        times = ',"queue_us":%d,"compute_us":%d' if common.has_times else _NONE * 2
        trace = ',"trace_id":"%s"' if common.has_trace else _NONE
        known = read if common.version else _NONE * 4
        return f'{{"time":"%s.%06dZ"{_constant(members)},"duration_us":%d{known}{times}{trace}}}\n'


def _constant(text: str) -> str:
    return text.replace("%", "%%")


def _trace_id(context: str) -> str:
    """Return the id of the trace in a ``traceparent``; empty if it is none."""
    found = _TRACE(context)
    return found[1] if found else ""


def _are_plain(texts: Sequence[str]) -> bool:
    """True if `_word` changes none of ``texts``. Checks all at once, in C."""
    joined = "".join(texts)
    return joined.isascii() and not joined.encode().translate(None, _PLAIN_BYTES)


@lru_cache(4)
def second(seconds: int) -> str:
    """Return the UTC time of a second since 1970."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def word(text: str) -> str:
    """Return ``text`` in a text line: as it is, or as a JSON string."""
    return text if _PLAIN(text) else json.dumps(text[:LONGEST])


def quoted(text: str) -> str:
    """Return ``text`` as a JSON string of at most `LONGEST` characters."""
    return f'"{text}"' if _PLAIN(text) else json.dumps(text[:LONGEST])
