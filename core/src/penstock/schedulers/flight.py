"""The requests of one model between submit and answer. Event loop only."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from penstock.errors import PenstockError
from penstock.messages.request import InferRequest
from penstock.messages.response import InferResponse

log = logging.getLogger(__name__)


class Flight:
    """Counts what is in flight, answers it, and knows when nothing is left.

    ``ordered`` holds answers back until all earlier requests are answered
    (``preserve_ordering``, behaviours.md section 6.2).
    """

    def __init__(self, ordered: bool = False) -> None:
        self.count = 0
        self.is_closing = False
        self._landed = asyncio.Event()
        self._line: OrderedDict[InferRequest, InferResponse | PenstockError | None] | None = (
            OrderedDict() if ordered else None
        )

    def enter(self, request: InferRequest) -> None:
        self.count += 1
        if self._line is not None:
            self._line[request] = None

    def answer(self, request: InferRequest, answer: InferResponse | PenstockError) -> None:
        """Give ``request`` its final answer, now or when its turn comes."""
        if self._line is None:
            self._respond(request, answer)
            return
        self._line[request] = answer
        while self._line:
            head, ready = next(iter(self._line.items()))
            if ready is None:
                return
            del self._line[head]
            self._respond(head, ready)

    async def close(self) -> None:
        """Wait until every request that entered is answered; the caller refuses new ones."""
        self.is_closing = True
        if self.count:
            await self._landed.wait()

    def _respond(self, request: InferRequest, answer: InferResponse | PenstockError) -> None:
        self.count -= 1
        try:
            request.respond(answer, True)
        except Exception:
            log.exception("a frontend failed to write the answer to request '%s'", request.id)
        if self.is_closing and not self.count:
            self._landed.set()
