"""Detects that a process no longer answers. It is suspended or stuck, but the system still assigns connections to
it."""

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
    """Calls ``ping`` every second, and ``lost`` once if the process has missed ``max_missed`` beats. Event loop only.

    Beats are counted, not seconds: if this process or its machine is suspended, that counts as one beat. A process that
    has not answered is not pinged again, so that no pings queue up.
    """

    def __init__(
        self, call_later: CallLater, ping: Callable[[], None], lost: Callable[[], None], max_missed: int
    ) -> None:
        self._call_later, self._ping, self._lost, self._max_missed = call_later, ping, lost, max_missed
        self._missed = 0
        self._is_waiting = False
        self._timer: DelayedCall = call_later(PERIOD_S, self._beat)

    @property
    def is_waiting(self) -> bool:
        """True if the process has not answered the last ping."""
        return self._is_waiting

    def answered(self) -> None:
        """Note that the process has answered the ping."""
        self._is_waiting = False

    def end(self) -> None:
        """Stop the heartbeat."""
        self._timer.cancel()

    def _beat(self) -> None:
        if self._is_waiting:
            self._missed += 1
            if self._missed >= self._max_missed:
                self._lost()
                return
        else:
            self._is_waiting, self._missed = True, 0
            self._ping()
        self._timer = self._call_later(PERIOD_S, self._beat)
