"""The strings of ``stop`` in a text that arrives in parts: the text ends before the first one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Ends one text before the first of ``stop``. One thread at a time.

    For engines that do not stop by themselves, or lose the text that they hold back when an answer ends otherwise.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        #: True if a stop string was found: the text has ended before it.
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """Return the text that may be sent after ``text`` was added: all but an end that may begin a stop string."""
        if not self._stop or not text:
            return text
        held = self._held + text
        found = [place for place in map(held.find, self._stop) if place >= 0]
        if found:
            self.has_stopped, self._held = True, ""
            return held[: min(found)]
        keep = max(_overlap(held, stop) for stop in self._stop)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """Return the held part; the answer ends here."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that ``stop`` begins with, and does not end with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
