"""What answers say about the machine: no path, unless the log is verbose.

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

_LOG = logging.getLogger("headrace")

#: What a path begins with, and nothing else that a message may hold: names of tensors have slashes, too.
_first_names = {path.name for path in Path("/").iterdir()}


def learn(paths: Iterable[str]) -> None:
    """Know the absolute ones of ``paths`` for paths of this machine even where nothing is found at them yet."""
    _first_names.update(path.lstrip("/").split("/")[0] for path in paths if path.startswith("/"))
    _first_names.discard("")
    _paths.cache_clear()


def shown(text: str) -> str:
    """``text`` for a caller: only the last name of every absolute path, unless the log is verbose.

    Verbose is a logger ``headrace`` at level DEBUG, which ``--log-verbose`` sets from 1 on.
    """
    if "/" not in text or _LOG.isEnabledFor(logging.DEBUG):
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
