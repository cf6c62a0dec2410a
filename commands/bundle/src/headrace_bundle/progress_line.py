"""Shows how far a command is, on stderr."""

from __future__ import annotations

import sys
import time
from typing import Protocol


class ShowStep(Protocol):
    """Told how far a step is."""

    def __call__(self, name: str, text: str, *, is_last: bool = False) -> None: ...


class ProgressLine:
    """One line per step on a terminal, rewritten five times a second; elsewhere a line for the end of each step."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown = 0.0
        self._is_open = False

    def step(self, name: str, text: str, *, is_last: bool = False) -> None:
        """Show ``text`` of the step ``name``. The step's end, ``is_last``, is always shown."""
        now = time.monotonic()
        if not is_last and (not self._is_terminal or now - self._shown < 0.2):
            return
        self._shown = now
        shown = f"{name}: {text}"
        if self._is_terminal:
            print(f"\r\033[K{shown}", end="\n" if is_last else "", file=sys.stderr, flush=True)
        else:
            print(shown, file=sys.stderr)
        self._is_open = self._is_terminal and not is_last

    def end(self) -> None:
        """Leave the line that is being rewritten."""
        if self._is_open:
            print(file=sys.stderr)
            self._is_open = False
