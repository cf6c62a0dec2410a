"""The requests of one model between submit and answer. Event loop only."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from penstock.messages.request import InferRequest
from penstock.messages.response import Answer

log = logging.getLogger(__name__)


class Flight:
    """Counts what is in flight, answers it, and knows when nothing is left.

    ``ordered`` holds answers back until all earlier requests are answered
    (``preserve_ordering``, behaviours.md section 6.2). ``counted`` callers take any number of
    responses and say which they have read; those of a model that is not decoupled take one.
    """

    def __init__(self, ordered: bool = False, counted: bool = False) -> None:
        self.count = 0
        self.is_closing = False
        self._counted = counted
        self._landed = asyncio.Event()
        self._line: OrderedDict[InferRequest, list[Answer]] | None = OrderedDict() if ordered else None

    def enter(self, request: InferRequest) -> None:
        self.count += 1
        if self._line is not None:
            self._line[request] = []
            request.respond_at_once = None  # its turn may not have come

    def progress(self, request: InferRequest, response: Answer) -> None:
        """Give ``request`` a response that is not its last; decoupled models keep no order."""
        self._write(request, response, False)
        if not self._counted:
            request.read()

    def answer(self, request: InferRequest, answer: Answer) -> None:
        """Give ``request`` its final answer, now or when its turn comes."""
        if self._line is None:
            self._finish(request, answer)
            return
        self._line[request].append(answer)
        while self._line:
            head, answers = next(iter(self._line.items()))
            if not answers:
                return
            del self._line[head]
            self._finish(head, answers[0])

    async def close(self) -> None:
        """Wait until every request that entered is answered; the caller refuses new ones."""
        self.is_closing = True
        if self.count:
            await self._landed.wait()

    def _finish(self, request: InferRequest, answer: Answer) -> None:
        self.count -= 1
        self._write(request, answer, True)
        if self.is_closing and not self.count:
            self._landed.set()

    def _write(self, request: InferRequest, answer: Answer, final: bool) -> None:
        try:
            request.respond(answer, final)
        except Exception:
            log.exception("a frontend failed to write the answer to request '%s'", request.id)
