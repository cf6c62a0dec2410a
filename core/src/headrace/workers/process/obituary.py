"""What a child's fatal error wrote, as operators and clients read it: where the model was."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line \d+,? in ')
_THREAD = re.compile(r"((?:Current t|T)hread) 0x[0-9a-f]+")
#: The frames below every thread's own; CPython's, in whichever library it has them.
_THREADING = re.compile(r'/threading\.py", line \d+ in (run|_bootstrap|_bootstrap_inner)$')


def edited(words: str, folders: Collection[str]) -> str:
    """``words``, a report of `faulthandler` or a traceback, without addresses, without the frames
    of the packages that lie in ``folders``, and without threads of which nothing is left then."""
    sections = words.partition("\nExtension modules:")[0].split("\n\n")
    kept = (_section(section.splitlines(), folders) for section in sections)
    return "\n\n".join(filter(None, kept)).strip()


def _section(lines: list[str], folders: Collection[str]) -> str:
    """The frames of one thread below its heading; empty if none of them is left."""
    kept = [_THREAD.sub(r"\1", line) for line in _without_ours(lines, folders)]
    is_thread = lines[:1] and _THREAD.match(lines[0])
    return "" if is_thread and len(kept) < 2 else "\n".join(kept)


def _without_ours(lines: list[str], folders: Collection[str]) -> Iterator[str]:
    is_ours = False
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            is_ours = frame["file"].startswith(tuple(folders)) or _THREADING.search(line) is not None
        elif not line.startswith("    "):  # deeper lines are the frame's source
            is_ours = False
        if not is_ours:
            yield line
