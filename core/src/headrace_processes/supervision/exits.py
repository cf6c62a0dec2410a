"""The exit of a process: how it is detected, how messages describe it, and when another process is started."""

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

from headrace_processes.supervision.child_process import ChildProcess

#: After a child has exited, its messages are still read for this long.
LAST_READ_S = 0.05
#: A child that has closed a channel must exit within this time.
_EXIT_GRACE_S = 0.25
#: After this many exits within the window, there is a pause before the next restart.
MAX_EXITS: Final = 5
WINDOW_S: Final = 60.0
#: In multiples of the first pause: the longest pause, and the time after a pause that resets the next one to the first.
_LONGEST_PAUSE, _QUIET = 16, 40
#: The delay before the second restart within the window, and the longest delay.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 15.0


# ---------------------------------------------------------------------- detection


class ExitWatcher:
    """Detects the exit of one process. Event loop only.

    ``ended`` is called with the exit code and the crash report, once or twice. ``cut_off`` is called if the process has
    lost a channel but keeps running: the caller must kill it.
    """

    def __init__(self, launched: ChildProcess, ended: Callable[[int, str], None], cut_off: Callable[[], None]) -> None:
        self._launched, self._ended, self._cut_off = launched, ended, cut_off
        self._loop = asyncio.get_running_loop()
        self._code: int | None = None
        self._report = ""
        self._has_hung_up = False

    def begin(self, name: str) -> None:
        """Start a thread that waits for the process to exit."""
        threading.Thread(target=self._wait, name=f"headrace-wait-{name}", daemon=True).start()

    def hung_up(self) -> None:
        """Note that the child's channel is closed and has been read to its end."""
        self._has_hung_up = True
        if self._code is not None:
            self._ended(self._code, self._report)
        else:
            self.lost_channel()

    def lost_channel(self) -> None:
        """Note that a channel is closed. An exiting child closes its channels first, so it has 0.25 s to exit. Then
        ``cut_off`` is called."""
        if self._code is None:
            self._loop.call_later(_EXIT_GRACE_S, self._check_exit)

    def _wait(self) -> None:
        code = self._launched.wait()
        with self._launched.crash_file:
            report = read_crash_report(self._launched)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._exited, code, report)

    def _exited(self, code: int, report: str) -> None:
        """Report the exit. If the channel has not been read to its end, do so after `LAST_READ_S`."""
        self._code, self._report = code, report
        if self._has_hung_up:
            self._ended(code, report)
        else:  # do not wait for the end of the channel: another process may keep its other end open
            self._loop.call_later(LAST_READ_S, self._ended, code, report)

    def _check_exit(self) -> None:
        if self._code is None:
            self._cut_off()


# ---------------------------------------------------------------------- description


def ending(code: int) -> str:
    """Describe an exit code, negative for a signal, as the end of a sentence "the process ..."."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line \d+,? in ')
#: From Python 3.14 on, the name of the thread is included.
_THREAD = re.compile(r"((?:Current t|T)hread) 0x[0-9a-f]+(?: \[.*\](?= \())?")
#: The heading of what Python 3.14 writes after the threads: addresses and libraries, for debuggers.
_C_STACK = "Current thread's C stack trace"
#: CPython's own frames at the bottom of every thread, whatever the folder of its library.
_THREADING = re.compile(r'/threading\.py", line \d+ in (run|_bootstrap|_bootstrap_inner)$')


def read_crash_report(launched: ChildProcess) -> str:
    """Return the traceback in the crash file, without the frames of the server's packages. Empty if there is none, or
    if the `ExitWatcher` has closed the file."""
    try:
        launched.crash_file.seek(0)
        content = launched.crash_file.read(64 * 1024)
    except ValueError:
        return ""
    return crash_report(content.decode(errors="backslashreplace"), launched.folders)


def crash_report(text: str, folders: Collection[str]) -> str:
    """Return ``text``, a report of `faulthandler` or a traceback, in the form for operators and clients.

    Addresses and the frames of the packages in ``folders`` are removed, and threads that have no other frames.
    """
    sections = text.partition("\nExtension modules:")[0].split("\n\n")
    shortened = (_section(section.splitlines(), folders) for section in sections if not section.startswith(_C_STACK))
    return "\n\n".join(filter(None, shortened)).strip()


def _section(lines: list[str], folders: Collection[str]) -> str:
    """Return the heading and the remaining frames of one thread; empty if no frame remains."""
    shown = [_THREAD.sub(r"\1", line) for line in _without_server_frames(lines, folders)]
    is_thread = lines[:1] and _THREAD.match(lines[0])
    return "" if is_thread and len(shown) < 2 else "\n".join(shown)


def _without_server_frames(lines: list[str], folders: Collection[str]) -> Iterator[str]:
    is_server_frame = False
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            is_server_frame = frame["file"].startswith(tuple(folders)) or _THREADING.search(line) is not None
        elif not line.startswith("    "):  # lines that are indented deeper are the frame's source
            is_server_frame = False
        if not is_server_frame:
            yield line


# ---------------------------------------------------------------------- restart


class RestartPolicy:
    """Decides how long to wait before a process that has exited is restarted.

    After the first exit within `WINDOW_S` (60 s), the restart is immediate. After further exits it is delayed, and
    after `MAX_EXITS` (5) there is a pause. ``first_pause_s`` is the length of the first pause.
    """

    def __init__(self, first_pause_s: float = 15.0) -> None:
        self._first_pause_s = first_pause_s
        self._times: deque[float] = deque(maxlen=MAX_EXITS)
        self._pauses = 0
        self._pause_ends = 0.0

    def add_exit(self) -> None:
        """Note that a process has exited now, or could not be started."""
        self._times.append(monotonic())

    @property
    def is_exhausted(self) -> bool:
        """True if `MAX_EXITS` exits were within the window: wait for `next_pause_s` instead of `delay_s`."""
        return len(self._times) == MAX_EXITS and self._times[-1] - self._times[0] < WINDOW_S

    @property
    def delay_s(self) -> float:
        """Return how long to wait: 0 s after the first exit within the window, then 0.5 s, twice as long each time, at
        most 15 s."""
        earlier = sum(self._times[-1] - exit_s < WINDOW_S for exit_s in self._times) - 1
        return min(_FIRST_DELAY_S * 2 ** (earlier - 1), _LONGEST_DELAY_S) if earlier else 0.0

    def next_pause_s(self) -> float:
        """Return how long to wait after too many exits, and clear them: 15 s, then twice as long each time, at most
        240 s. If 10 minutes have passed since a pause, the next one is 15 s again.

        With another first pause, the two limits are 16 and 40 times its length.
        """
        now = monotonic()
        if now - self._pause_ends > self._first_pause_s * _QUIET:
            self._pauses = 0
        pause_s: float = self._first_pause_s * min(2**self._pauses, _LONGEST_PAUSE)
        self._pauses += 1
        self._pause_ends = now + pause_s
        self._times.clear()
        return pause_s
