"""How long after a death another child is started, and when no more."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Final

#: This many deaths within the window, and the instance is given up.
MOST: Final = 5
WINDOW_S: Final = 60.0
#: Before the second restart within the window, and at most before any.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 15.0


class Deaths:
    """Those of the processes of one instance."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MOST)

    def add(self) -> None:
        """A process has died now, or another could not be started."""
        self._times.append(monotonic())

    @property
    def are_too_many(self) -> bool:
        """Whether the last was one too many within the window."""
        return len(self._times) == MOST and self._times[-1] - self._times[0] < WINDOW_S

    @property
    def delay_s(self) -> float:
        """How long to wait: not after the first death in a while, then twice as long each time."""
        earlier = sum(self._times[-1] - death < WINDOW_S for death in self._times) - 1
        return min(_FIRST_DELAY_S * 2 ** (earlier - 1), _LONGEST_DELAY_S) if earlier else 0.0
