"""How a process ended, in the words of messages about it, and when another is started in its place."""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Collection, Iterator
from time import monotonic
from typing import Final

# ---------------------------------------------------------------------- words


def ending(code: int) -> str:
    """What a process with this exit code, negative for a signal, did: to complete "the process ..."."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line \d+,? in ')
_THREAD = re.compile(r"((?:Current t|T)hread) 0x[0-9a-f]+")
#: The frames below every thread's own; CPython's, in whichever library it has them.
_THREADING = re.compile(r'/threading\.py", line \d+ in (run|_bootstrap|_bootstrap_inner)$')


def crash_report(words: str, folders: Collection[str]) -> str:
    """``words``, a report of `faulthandler` or a traceback, as operators and clients read it: without
    addresses, without the frames of the packages that lie in ``folders``, and without threads of which
    nothing is left then."""
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


# ---------------------------------------------------------------------- what follows

#: This many exits within the window, and the instance is given up.
MOST: Final = 5
WINDOW_S: Final = 60.0
#: Before the second restart within the window, and at most before any.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 15.0


class RestartPolicy:
    """How long after the process of an instance has ended another is started, and when no more."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MOST)

    def add_exit(self) -> None:
        """A process has ended now, or another could not be started."""
        self._times.append(monotonic())

    @property
    def is_exhausted(self) -> bool:
        """Whether the last exit was one too many within the window."""
        return len(self._times) == MOST and self._times[-1] - self._times[0] < WINDOW_S

    @property
    def delay_s(self) -> float:
        """How long to wait: not after the first exit in a while, then twice as long each time."""
        earlier = sum(self._times[-1] - exit_s < WINDOW_S for exit_s in self._times) - 1
        return min(_FIRST_DELAY_S * 2 ** (earlier - 1), _LONGEST_DELAY_S) if earlier else 0.0
