"""Requests that were answered with an error: their log lines, and the texts for their callers.

A server's fault is logged as one line, at a limited rate. A caller's fault is logged as one line if the log is verbose
(``--log-verbose=1``). Successful requests never reach this code.

Errors of models, engines and the file system contain paths. The log has them whole; callers get only the last name of
each. Every frontend passes the text of an error, and the reasons of the index, through `without_paths`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from headrace.errors import CallerError, Code, HeadraceError
from headrace.telemetry.log_limits import rate_limited_logger

log = rate_limited_logger("headrace.requests")

_SERVER_LOG = logging.getLogger("headrace")
_LEVELS = {Code.INTERNAL: logging.ERROR, Code.UNKNOWN: logging.ERROR, Code.UNAVAILABLE: logging.WARNING}
#: At most this many characters of a caller's text are logged, in one line.
_CHARACTERS = 1000
#: The first names of absolute paths. Other texts have slashes, too, such as names of tensors.
_first_names = {path.name for path in Path("/").iterdir()}


class Failure(NamedTuple):
    """The parts of an error that the log needs. The error itself would keep its frames, and so their requests."""

    message: str
    code: Code
    level: int

    @classmethod
    def of(cls, error: HeadraceError) -> Failure:
        return cls(error.message, error.code, level_of(error))


def is_verbose() -> bool:
    """True if every failed request is logged, and successful ones too."""
    return log.isEnabledFor(logging.DEBUG)


def level_of(error: HeadraceError) -> int:
    """Return the log level for ``error``: DEBUG if the caller is at fault."""
    return logging.DEBUG if isinstance(error, CallerError) else _LEVELS.get(error.code, logging.DEBUG)


def log_failure(failure: Failure, what: str, model: str = "", version: str = "", request_id: str = "") -> None:
    """Log that a request was answered with ``failure``, in Triton's words for an inference.

    ``what`` is ``Infer``, or the path or the name of the call. It may come from the caller, like the other names.
    """
    if not log.isEnabledFor(failure.level):
        return
    text = f"{_short(what)} failed: {_short(failure.message)} ({failure.code.value}"
    if what == "Infer":
        text = f"[request id: {_short(request_id) or '<id_unknown>'}] {text}"
    if model:
        text += f", model '{_short(model)}'" + (f" version {version[:40]}" if version else "")
    extra = {"model": _short(model), "version": version[:40], "request_id": _short(request_id)}
    fields = {name: value for name, value in extra.items() if value}
    # The record has the line of this function's caller.
    log.log(failure.level, "%s)", text, extra={**fields, "code": failure.code.value}, stacklevel=2)


def log_fault(error: HeadraceError, what: str, model: str = "", version: str = "") -> None:
    """Log a fault of the server, unless the log is verbose: the code that logs all requests then logs it."""
    if level_of(error) > logging.DEBUG and not is_verbose():
        log_failure(Failure.of(error), what, model, version)


def _short(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."


def learn_paths(paths: Iterable[str]) -> None:
    """Treat the absolute ones of ``paths`` as paths of this machine, even if they do not exist yet."""
    _first_names.update(path.lstrip("/").split("/")[0] for path in paths if path.startswith("/"))
    _first_names.discard("")
    _paths.cache_clear()


def without_paths(text: str) -> str:
    """Return ``text`` with every absolute path cut to its last name. If the log is verbose, return it unchanged.

    It is verbose if the logger ``headrace`` has level DEBUG, which ``--log-verbose`` sets from 1 on.
    """
    if "/" not in text or _SERVER_LOG.isEnabledFor(logging.DEBUG):
        return text
    return _paths().sub(_last_name, text)


@cache
def _paths() -> re.Pattern[str]:
    """Return the pattern of a path. It takes linear time: a path starts at a run of slashes, and ends at certain
    characters.

    A path in quotes ends at the closing quote, and may have blanks.
    """
    names = "|".join(map(re.escape, sorted(_first_names)))
    return re.compile(
        rf"""(?P<quote>['"])/+(?:{names})(?:/[^'"\n]*)?(?P=quote)"""
        rf"""|(?<![\w.~/-])/+(?:{names})(?![\w.-])(?:/[^\s'"`:;,()<>\[\]{{}}|/]*)*"""
    )


def _last_name(match: re.Match[str]) -> str:
    quote = match["quote"] or ""
    return f"{quote}.../{match[0].strip(quote or None).rstrip('/').rpartition('/')[2]}{quote}"
