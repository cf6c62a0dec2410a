"""The requests of one model between submit and answer. Event loop only."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from penstock.errors import Unavailable
from penstock.messages.request import InferRequest
from penstock.messages.response import Answer
from penstock.telemetry.pacing import paced

log = paced(__name__)


class Flight:
    """Counts what is in flight, answers it, and knows when nothing is left.

    ``ordered`` holds answers back until all earlier requests are answered
    (``preserve_ordering``, behaviours.md section 6.2). ``counted`` callers take any number of
    responses and say which they have read; those of a model that is not decoupled take one.
    What is said to a request that has been answered already, as `abandon` does, is dropped.
    """

    def __init__(self, ordered: bool = False, counted: bool = False) -> None:
        self.is_closing = False
        self._counted = counted
        self._open: dict[InferRequest, None] = {}
        self._landed = asyncio.Event()
        self._line: OrderedDict[InferRequest, list[Answer]] | None = OrderedDict() if ordered else None

    @property
    def count(self) -> int:
        """Requests that have entered and not been answered."""
        return len(self._open)

    def enter(self, request: InferRequest) -> None:
        self._open[request] = None
        if self._line is not None:
            self._line[request] = []
            request.respond_at_once = None  # its turn may not have come

    def progress(self, request: InferRequest, response: Answer) -> None:
        """Give ``request`` a response that is not its last; decoupled models keep no order."""
        if request in self._open:
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
        if self._open:
            await self._landed.wait()

    def abandon(self, reason: str) -> None:
        """Answer every request, now: with `Unavailable` for ``reason``, unless its answer was held back.
        Have what is executed for it end."""
        self.is_closing = True
        line, self._line = self._line, None
        for request in tuple(self._open):
            request.respond_at_once = None
            held = line[request] if line is not None else []
            self._finish(request, held[0] if held else Unavailable(f"{request.log_id}{reason}"))
            request.cancel()
        self._landed.set()

    def _finish(self, request: InferRequest, answer: Answer) -> None:
        if self._open.pop(request, False) is False:
            return  # answered before
        self._write(request, answer, True)
        if self.is_closing and not self._open:
            self._landed.set()

    def _write(self, request: InferRequest, answer: Answer, final: bool) -> None:
        try:
            request.respond(answer, final)
        except KeyboardInterrupt:  # on the event loop it is the operator's
            raise
        except BaseException:
            log.exception("a frontend failed to write the answer to request '%s'", request.id)
