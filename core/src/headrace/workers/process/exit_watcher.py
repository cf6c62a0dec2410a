"""The end of a child: it is over when the process has ended and what it sent before has been read."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from headrace.workers.process.launch import Launched

#: How long what a child sent before it died may still arrive.
LAST_READ_S = 0.05
#: How long a child may take to end when it has closed a channel.
_LAST_BREATH_S = 0.25


class ExitWatcher:
    """Of one process. Event loop only.

    ``ended`` is called with the exit code and the crash report, once or twice; ``cut_off`` when the process
    lives on without a channel, and has to be killed.
    """

    def __init__(self, launched: Launched, ended: Callable[[int, str], None], cut_off: Callable[[], None]) -> None:
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
            report = self._launched.crash_report()
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
