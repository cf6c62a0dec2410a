"""Notices that a process answers no more: it is stopped, or stuck, and the system goes on handing it connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

#: Between two beats.
PERIOD_S: Final = 1.0


class DelayedCall(Protocol):
    """A call that is still to come."""

    def cancel(self) -> None: ...


#: Has a call made on the event loop in so many seconds.
CallLater: TypeAlias = Callable[[float, Callable[[], None]], DelayedCall]


class Heartbeat:
    """Has a process asked whether it is there, by ``ask``, every second; ``lost`` is called once it has not answered
    for ``most_beats`` of them. Event loop only.

    Beats are counted and not seconds: when this process has been stopped itself, or its machine, that is one beat for
    both. Who is asked and has not answered is not asked again, so that nothing piles up in front of it.
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
        """Whether the process has an answer to give."""
        return self._is_asked

    def heard(self) -> None:
        """It has answered."""
        self._is_asked = False

    def end(self) -> None:
        """Nobody wants to know any more."""
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
