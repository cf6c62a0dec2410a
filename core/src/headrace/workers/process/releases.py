"""What the server no longer looks at in the arena of a child, told in one message for many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace.workers.crossing import Crossing
from headrace.workers.process.wire.frames import Kind, integers_frame

#: What the number of a frame can count.
_MOST = 65535


class Releases:
    """Tells offsets by ``send``, on the loop to which ``crossing`` leads."""

    def __init__(self, crossing: Crossing, send: Callable[[bytes], None]) -> None:
        self._crossing, self._send = crossing, send
        self._free: deque[int] = deque()
        self._is_telling = False

    def add(self, offset: int) -> None:
        """Nobody looks at the tensor at ``offset`` any more. Any thread, in the middle of any call of it."""
        self._free.append(offset)
        if not self._is_telling:
            self._is_telling = True
            self._crossing.send(self._tell)

    def _tell(self) -> None:
        self._is_telling = False  # first: what comes from here on is told, too
        while self._free:
            offsets = [self._free.popleft() for _ in range(min(len(self._free), _MOST))]
            self._send(integers_frame(Kind.RELEASE, offsets))
