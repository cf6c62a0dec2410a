"""The end of a process: noticed, in the words of messages about it, and followed by another."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from time import monotonic
from typing import Final

from headrace.supervision.child_process import ChildProcess

#: How long what a child sent before it died may still arrive.
LAST_READ_S = 0.05
#: How long a child may take to end when it has closed a channel.
_LAST_BREATH_S = 0.25
#: After this many exits within the window, no other process is started for a pause.
MOST: Final = 5
WINDOW_S: Final = 60.0
#: The first pause, the longest, and how long after a pause the next counts as the first again.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _QUIET_S = 15.0, 240.0, 600.0
#: Before the second restart within the window, and at most before any.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 15.0


# ---------------------------------------------------------------------- noticed


class ExitWatcher:
    """Of one process. Event loop only.

    ``ended`` is called with the exit code and the crash report, once or twice; ``cut_off`` when the process
    lives on without a channel, and has to be killed.
    """

    def __init__(self, launched: ChildProcess, ended: Callable[[int, str], None], cut_off: Callable[[], None]) -> None:
        self._launched, self._ended, self._cut_off = launched, ended, cut_off
        self._loop = asyncio.get_running_loop()
        self._code: int | None = None
        self._report = ""
        self._has_hung_up = False

    def begin(self, name: str) -> None:
        """Wait for the end of the process, on a thread of its own."""
        threading.Thread(target=self._wait, name=f"headrace-wait-{name}", daemon=True).start()

    def hung_up(self) -> None:
        """Nothing more will come from the child."""
        self._has_hung_up = True
        if self._code is not None:
            self._ended(self._code, self._report)
        else:
            self.lost_channel()

    def lost_channel(self) -> None:
        """A child that ends closes its channels first; one that lives on without them is of no use."""
        if self._code is None:
            self._loop.call_later(_LAST_BREATH_S, self._end_it)

    def _wait(self) -> None:
        code = self._launched.wait()
        with self._launched.crash_file:
            report = read_crash_report(self._launched)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._exited, code, report)

    def _exited(self, code: int, report: str) -> None:
        """The process is gone; what it sent before is still to be read, unless it has been."""
        self._code, self._report = code, report
        if self._has_hung_up:
            self._ended(code, report)
        else:  # another process may hold the other end
            self._loop.call_later(LAST_READ_S, self._ended, code, report)

    def _end_it(self) -> None:
        if self._code is None:
            self._cut_off()


# ---------------------------------------------------------------------- in words


def ending(code: int) -> str:
    """What a process with this exit code, negative for a signal, did: to complete "the process ..."."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line \d+,? in ')
#: From Python 3.14 on, with the thread's name.
_THREAD = re.compile(r"((?:Current t|T)hread) 0x[0-9a-f]+(?: \[.*\](?= \())?")
#: What Python 3.14 writes behind the threads: addresses and libraries, for debuggers.
_C_STACK = "Current thread's C stack trace"
#: The frames below every thread's own; CPython's, in whichever library it has them.
_THREADING = re.compile(r'/threading\.py", line \d+ in (run|_bootstrap|_bootstrap_inner)$')


def read_crash_report(launched: ChildProcess) -> str:
    """What the child's fatal error wrote, if anything, without the frames of the server's packages.

    Nothing once the `ExitWatcher` has read it and closed the file.
    """
    try:
        launched.crash_file.seek(0)
        words = launched.crash_file.read(64 * 1024)
    except ValueError:
        return ""
    return crash_report(words.decode(errors="backslashreplace"), launched.folders)


def crash_report(words: str, folders: Collection[str]) -> str:
    """``words``, a report of `faulthandler` or a traceback, as operators and clients read it: without
    addresses, without the frames of the packages that lie in ``folders``, and without threads of which
    nothing is left then."""
    sections = words.partition("\nExtension modules:")[0].split("\n\n")
    kept = (_section(section.splitlines(), folders) for section in sections if not section.startswith(_C_STACK))
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


class RestartPolicy:
    """How long after the process of an instance has ended another is started.

    A process that ends now and then is followed at once. One of several exits within `WINDOW_S` is followed after a
    delay, and `MOST` of them by a pause.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MOST)
        self._pauses = 0
        self._pause_ends = 0.0

    def add_exit(self) -> None:
        """A process has ended now, or another could not be started."""
        self._times.append(monotonic())

    @property
    def is_exhausted(self) -> bool:
        """True if the last exit was one too many within the window: then `next_pause_s` follows."""
        return len(self._times) == MOST and self._times[-1] - self._times[0] < WINDOW_S

    @property
    def delay_s(self) -> float:
        """Return how long to wait: not after the first exit in a while, then twice as long each time."""
        earlier = sum(self._times[-1] - exit_s < WINDOW_S for exit_s in self._times) - 1
        return min(_FIRST_DELAY_S * 2 ** (earlier - 1), _LONGEST_DELAY_S) if earlier else 0.0

    def next_pause_s(self) -> float:
        """Return how long to wait after too many exits, and forget these: 15 s, then twice as long each time, at most
        240 s. 10 minutes after a pause, the next one takes 15 s again."""
        now = monotonic()
        if now - self._pause_ends > _QUIET_S:
            self._pauses = 0
        pause_s: float = min(_FIRST_PAUSE_S * 2**self._pauses, _LONGEST_PAUSE_S)
        self._pauses += 1
        self._pause_ends = now + pause_s
        self._times.clear()
        return pause_s
