"""``headrace check --security``: lists who may do what on a server with the given flags."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import PurePath
from typing import Any

from headrace import HeadraceError, SecurityReview, one_line

_RED, _PLAIN = "\x1b[31m", "\x1b[0m"
#: Programs whose flags may follow; ``serve`` is the command of the first.
_PROGRAMS = ("headrace", "tritonserver")


def review(words: Sequence[str], is_json: bool) -> int:
    """Print who may do what on a server with the flags ``words``.

    Return 1 if something is open that the profile ``public`` closes, or if the flags are refused; otherwise 0.

    ``words`` may begin with ``headrace serve`` or ``tritonserver``.
    """
    logging.disable(logging.CRITICAL)
    try:
        lines = SecurityReview.of_command_line(_flags(words)).as_dicts()
    except HeadraceError as error:
        print(error.message, file=sys.stderr)
        return 1
    finally:
        logging.disable(logging.NOTSET)
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(json.dumps(lines, indent=2) if is_json else "\n".join(_picture(lines, is_coloured)))
    return int(any(line["is_open"] for line in lines))


def _flags(words: Sequence[str]) -> Sequence[str]:
    """Return ``words`` without the program in front of them."""
    if words and PurePath(words[0]).name in _PROGRAMS:
        words = words[1:]
        if words and words[0] == "serve":
            words = words[1:]
    return words


def _picture(lines: Sequence[Mapping[str, Any]], is_coloured: bool) -> Iterator[str]:
    for where, group in groupby(lines, lambda line: line["where"]):
        yield one_line(where)
        for line in group:
            mark = "OPEN" if line["is_open"] else "ok  "
            mark = f"{_RED}{mark}{_PLAIN}" if line["is_open"] and is_coloured else mark
            yield f"  {mark}  {one_line(line['what'])}: {one_line(line['who'])}"
            if line["is_open"]:
                yield f"        to close it: {one_line(line['remedy'])}"
        yield ""
    count = sum(line["is_open"] for line in lines)
    things = "1 thing is" if count == 1 else f"{count or 'no'} things are"
    yield f"{things} open that --security-profile=public closes"
