"""Requests that were answered with an error: what the log has of them, and what their callers are told.

In the log, what is the server's fault is one line each, which the pace of the logger bounds. What is the caller's
is one line where the log is verbose (``--log-verbose=1``). Successful requests never come here.

Errors of models, engines and the file system name files. Whoever runs the server finds them whole
in its log; a caller elsewhere is told the last name of each. Every frontend passes through `shown`
what it tells of an error, and the reasons of the index.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from headrace.errors import CallerError, Code, HeadraceError
from headrace.telemetry.pacing import paced

log = paced("headrace.requests")

_SERVER_LOG = logging.getLogger("headrace")
_LEVELS = {Code.INTERNAL: logging.ERROR, Code.UNKNOWN: logging.ERROR, Code.UNAVAILABLE: logging.WARNING}
#: Of what a caller has written, in one line.
_CHARACTERS = 1000
#: What a path begins with, and nothing else that a message may hold: names of tensors have slashes, too.
_first_names = {path.name for path in Path("/").iterdir()}


class Failure(NamedTuple):
    """What the log needs of an error, which itself would keep the frames that it came through, and their requests."""

    message: str
    code: Code
    level: int

    @classmethod
    def of(cls, error: HeadraceError) -> Failure:
        return cls(error.message, error.code, level_of(error))


def is_verbose() -> bool:
    """Whether every failed request is to be told, and requests that succeed, too."""
    return log.isEnabledFor(logging.DEBUG)


def level_of(error: HeadraceError) -> int:
    """The level of a line about ``error``: DEBUG where the caller is at fault."""
    return logging.DEBUG if isinstance(error, CallerError) else _LEVELS.get(error.code, logging.DEBUG)


def tell(failure: Failure, what: str, model: str = "", version: str = "", request_id: str = "") -> None:
    """Log that a request was answered with ``failure``, in Triton's words for an inference.

    ``what`` was asked for: ``Infer``, or the path or the name of the call. Names may be a caller's own.
    """
    if not log.isEnabledFor(failure.level):
        return
    text = f"{_short(what)} failed: {_short(failure.message)} ({failure.code.value}"
    if what == "Infer":
        text = f"[request id: {_short(request_id) or '<id_unknown>'}] {text}"
    if model:
        text += f", model '{_short(model)}'" + (f" version {version[:40]}" if version else "")
    extra = {"model": _short(model), "version": version[:40], "request_id": _short(request_id)}
    given = {name: value for name, value in extra.items() if value}
    # The log names the caller's line.
    log.log(failure.level, "%s)", text, extra={**given, "code": failure.code.value}, stacklevel=2)


def tell_fault(error: HeadraceError, what: str, model: str = "", version: str = "") -> None:
    """`tell` where it is the server's fault, unless the log is verbose: then whoever watches requests tells all."""
    if level_of(error) > logging.DEBUG and not is_verbose():
        tell(Failure.of(error), what, model, version)


def _short(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."


def learn_paths(paths: Iterable[str]) -> None:
    """Know the absolute ones of ``paths`` for paths of this machine even where nothing is found at them yet."""
    _first_names.update(path.lstrip("/").split("/")[0] for path in paths if path.startswith("/"))
    _first_names.discard("")
    _paths.cache_clear()


def shown(text: str) -> str:
    """``text`` for a caller: only the last name of every absolute path, unless the log is verbose.

    Verbose is a logger ``headrace`` at level DEBUG, which ``--log-verbose`` sets from 1 on.
    """
    if "/" not in text or _SERVER_LOG.isEnabledFor(logging.DEBUG):
        return text
    return _paths().sub(_last_name, text)


@cache
def _paths() -> re.Pattern[str]:
    """Linear: a path is looked for where a run of slashes begins, and has no character that ends it.

    One in quotes goes to the closing quote, blanks included.
    """
    names = "|".join(map(re.escape, sorted(_first_names)))
    return re.compile(
        rf"""(?P<quote>['"])/+(?:{names})(?:/[^'"\n]*)?(?P=quote)"""
        rf"""|(?<![\w.~/-])/+(?:{names})(?![\w.-])(?:/[^\s'"`:;,()<>\[\]{{}}|/]*)*"""
    )


def _last_name(found: re.Match[str]) -> str:
    quote = found["quote"] or ""
    return f"{quote}.../{found[0].strip(quote or None).rstrip('/').rpartition('/')[2]}{quote}"
