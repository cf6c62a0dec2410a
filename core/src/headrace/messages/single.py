"""The one answer to a request, whatever its model sends."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from headrace.errors import HeadraceError, InternalError
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket


class SingleAnswer(ABC):
    """A `Respond` that settles once, when the last answer has come. Event loop only.

    The first error goes before everything else; more or fewer responses than one are an error, in
    Triton's words.
    """

    __slots__ = ("_answer", "_count")

    def __init__(self) -> None:
        self._answer: Answer = None
        self._count = 0

    def __call__(self, answer: Answer, final: bool) -> None:
        if final and answer is not None and not self._count:  # nearly always
            self.settle(answer)
            return
        if answer is not None:
            self._count += 1
            if not isinstance(self._answer, HeadraceError):
                self._answer = answer
        if final:
            found = self._answer
            if found is None or (self._count != 1 and not isinstance(found, HeadraceError)):
                found = InternalError(f"expected a single response, got {self._count}")
            self.settle(found)

    @abstractmethod
    def settle(self, answer: InferResponse | HeadraceError) -> None:
        """Take the answer. Called once."""


class AwaitedAnswer(SingleAnswer):
    """A single answer that a task waits for."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        super().__init__()
        # An error is a result, too: as an exception it would be logged when the caller has gone.
        self._future: asyncio.Future[InferResponse | HeadraceError] = asyncio.get_running_loop().create_future()

    def settle(self, answer: InferResponse | HeadraceError) -> None:
        if not self._future.done():  # done: the caller has gone
            self._future.set_result(answer)

    async def to(self, ticket: Ticket) -> InferResponse:
        """The response to ``ticket``, which has been submitted; cancelling cancels it.

        Raises the `HeadraceError` that it was answered with.
        """
        try:
            answer = await self._future
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        if isinstance(answer, HeadraceError):
            raise answer
        return answer
