"""Detects that a process has stopped answering: it is suspended or stuck, yet the system still gives it connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

#: The time between two beats.
PERIOD_S: Final = 1.0


class DelayedCall(Protocol):
    """A call that is scheduled and can be cancelled."""

    def cancel(self) -> None: ...


#: Schedules a call on the event loop, after a delay in seconds.
CallLater: TypeAlias = Callable[[float, Callable[[], None]], DelayedCall]


class Heartbeat:
    """Pings a process by ``ask`` every second. Calls ``lost`` once if it has not answered for ``most_beats`` beats.
    Event loop only.

    Beats are counted, not seconds: if this process or its machine is suspended, that counts as one beat. A process that
    has not answered is not pinged again, so that no pings queue up.
    """

    def __init__(
        self, call_later: CallLater, ask: Callable[[], None], lost: Callable[[], None], most_beats: int
    ) -> None:
        self._call_later, self._ask, self._lost, self._most_beats = call_later, ask, lost, most_beats
        self._missed = 0
        self._is_asked = False
        self._timer: DelayedCall = call_later(PERIOD_S, self._beat)

    @property
    def is_asked(self) -> bool:
        """True if the process has not answered the last ping."""
        return self._is_asked

    def answered(self) -> None:
        """Note that the process has answered the ping."""
        self._is_asked = False

    def end(self) -> None:
        """Stop the heartbeat."""
        self._timer.cancel()

    def _beat(self) -> None:
        if self._is_asked:
            self._missed += 1
            if self._missed >= self._most_beats:
                self._lost()
                return
        else:
            self._is_asked, self._missed = True, 0
            self._ask()
        self._timer = self._call_later(PERIOD_S, self._beat)
