"""What a child says to its server, from any of its threads, in order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial

from headrace.messages.request import InferRequest
from headrace.workers.process.arena import Arena, Writer
from headrace.workers.process.line import Line
from headrace.workers.process.outbox import Outbox
from headrace.workers.process.wire.answers import Reply, Status, Times, reply_of, unsendable_reply
from headrace.workers.process.wire.codec import Encoder
from headrace.workers.process.wire.frames import Kind, integers_frame
from headrace.workers.process.wire.requests import unsendable_request


class Sender:
    """Writes answers on ``work`` and everything else on ``side``; large tensors go into ``arena``.

    ``free`` takes offsets in the server's arena at which nobody looks any more; `release` tells them.
    """

    def __init__(self, work: Line, side: Line, arena: Arena) -> None:
        self.free: deque[int] = deque()
        self._work, self._side = work, side
        self._outbox = Outbox()
        self._places = Writer(arena)
        self._encoder = Encoder(self._places)

    def answer(self, replies: list[Reply], kind: Kind, times: Times | None = None) -> None:
        """Send answers; `Kind.DONE` has ``times``. What cannot travel becomes an error."""
        self._outbox.post(partial(self._write, replies, kind, times))

    def ask(self, call: int, request: InferRequest, replied: Callable[[Reply], None]) -> None:
        """Send ``request`` to another model; ``replied`` is told if it cannot travel."""
        self._outbox.post(partial(self._write_request, call, request, replied))

    def take_back(self, offsets: list[int]) -> None:
        """The server looks no more at what is at ``offsets`` in our arena."""
        self._outbox.post(partial(self._free_places, offsets))

    def release(self) -> None:
        """Tell the server what is in ``free``."""
        if not self.free:
            return
        offsets: list[int] = []
        with contextlib.suppress(IndexError):  # another thread may be at it, too
            while True:
                offsets.append(self.free.popleft())
        if offsets:
            self._side.send(integers_frame(Kind.RELEASE, offsets))

    def _write(self, replies: list[Reply], kind: Kind, times: Times | None) -> None:
        try:
            message = self._encoder.answers(kind, replies, times)
        except ValueError as error:
            message = self._encoder.answers(kind, self._apart(replies, error), times)
        self._work.send(message)

    def _apart(self, replies: list[Reply], error: ValueError) -> list[Reply]:
        """What remains to be sent of ``replies`` that cannot travel together."""
        if len(replies) == 1:
            return [unsendable_reply(replies[0], error)]
        for reply in replies:
            if reply.status is not Status.LATER:
                self._write([reply], Kind.ANSWERS, None)
        return []

    def _write_request(self, call: int, request: InferRequest, replied: Callable[[Reply], None]) -> None:
        try:
            message = self._encoder.requests(Kind.INFER, [(call, request)])
        except Exception as error:
            replied(reply_of(call, unsendable_request(error), True))
        else:
            self._side.send(message)

    def _free_places(self, offsets: list[int]) -> None:
        for offset in offsets:
            self._places.release(offset)
