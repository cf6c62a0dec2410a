"""The responses of a decoupled model to a request that a model made.

Source: docs/spec/behaviours.md sections 9.2 and 9.5.
"""

from __future__ import annotations

from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

from headrace import Answer, Ticket
from triton_python_backend_utils.inference_response import InferenceResponse

if TYPE_CHECKING:
    from headrace import Services


class ResponseIterator:
    """Gives each response as it comes; the last may be empty. Begun anew at its end, it gives them again.

    Whoever drops it unfinished tells the model that nobody waits any more.
    """

    __slots__ = ("__weakref__", "_answers", "_finished", "_given", "_position", "_services", "_ticket")

    def __init__(self, services: Services, ticket: Ticket, answers: SimpleQueue[tuple[Answer, bool]]) -> None:
        self._services = services
        self._ticket = ticket
        self._answers = answers
        self._given: list[InferenceResponse] = []
        self._position = 0
        self._finished = False

    def __iter__(self) -> ResponseIterator:
        if self._finished and self._position == len(self._given):
            self._position = 0
        return self

    def __next__(self) -> InferenceResponse:
        """Waits for the next response."""
        if self._position == len(self._given):
            if self._finished:
                raise StopIteration
            self._take()
        response = self._given[self._position]
        self._position += 1
        return response

    def cancel(self) -> None:
        """Tell the model that no more is wanted. What it answers nevertheless is given as ever."""
        if not self._finished:
            self._services.stop(self._ticket)

    def __del__(self) -> None:
        # Perhaps as the interpreter ends; nobody could take an error.
        with suppress(Exception):
            if not self._finished:
                self._services.cancel(self._ticket)

    def _take(self) -> None:
        answer, final = self._answers.get()
        if final:
            self._finished = True
        else:
            self._services.read(self._ticket)
        self._given.append(InferenceResponse._received(answer, self._services.shares_memory))
