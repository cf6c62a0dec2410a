"""Exactly one answer to a request, however many its model sends."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from headrace.errors import HeadraceError, InternalError
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket


class SingleAnswer(ABC):
    """A `Respond` that calls `settle` once, with the last answer. Event loop only.

    If there was an error, the first one is the answer. If there was not exactly one response, the answer is Triton's
    error for that.
    """

    __slots__ = ("_answer", "_count")

    def __init__(self) -> None:
        self._answer: Answer = None
        self._count = 0

    def __call__(self, answer: Answer, final: bool) -> None:
        if final and answer is not None and not self._count:  # the usual case
            self.settle(answer)
            return
        if answer is not None:
            self._count += 1
            if not isinstance(self._answer, HeadraceError):
                self._answer = answer
        if final:
            last = self._answer
            if last is None or (self._count != 1 and not isinstance(last, HeadraceError)):
                last = InternalError(f"expected a single response, got {self._count}")
            self.settle(last)

    @abstractmethod
    def settle(self, answer: InferResponse | HeadraceError) -> None:
        """Handle the answer. Called once."""


class AwaitedAnswer(SingleAnswer):
    """A single answer that a task waits for."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        super().__init__()
        # An error is set as a result: asyncio would log an exception that no task retrieves after a disconnect.
        self._future: asyncio.Future[InferResponse | HeadraceError] = asyncio.get_running_loop().create_future()

    def settle(self, answer: InferResponse | HeadraceError) -> None:
        if not self._future.done():  # done: the caller was cancelled
            self._future.set_result(answer)

    async def to(self, ticket: Ticket) -> InferResponse:
        """Wait for the response to ``ticket``, which must have been submitted, and return it. If the task is cancelled,
        so is the request. Raises the `HeadraceError` if the answer is one."""
        try:
            answer = await self._future
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        if isinstance(answer, HeadraceError):
            raise answer
        return answer
