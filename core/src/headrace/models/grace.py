"""How long an instance in a process may take to close before it is killed."""

from __future__ import annotations

from time import monotonic

#: Of the time that the server has to stop, or that is left of it. The rest is for killing.
_PART = 0.8


class Grace:
    """``exit_timeout_s`` is how long the server may take to stop."""

    def __init__(self, exit_timeout_s: float) -> None:
        self._whole_s = exit_timeout_s
        self._ends: float | None = None

    def stopping(self) -> None:
        """The server has begun to stop: its time runs, and that of every instance with it."""
        self._ends = monotonic() + self._whole_s

    def __call__(self) -> float:
        """Seconds for an instance that is to close from now on."""
        left_s = self._whole_s if self._ends is None else self._ends - monotonic()
        return _PART * max(left_s, 0.0)
