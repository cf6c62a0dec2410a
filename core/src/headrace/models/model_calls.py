"""Requests that models send to models (docs/spec/behaviours.md section 9.5). Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from headrace.errors import HeadraceError, InternalError, InvalidArgument, Unavailable, summary
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.ticket import Respond, Ticket
from headrace.models.deadlocks import DeadlockDetector
from headrace.models.entrance import Entrance, model, not_by_models
from headrace.models.interception import Interceptor
from headrace.models.serving_table import ServingTable
from headrace.models.view import ModelView
from headrace.telemetry.pacing import paced
from headrace.workers.worker import Worker

log = paced(__name__)

#: Models that may wait for one request, one behind the other: a recursion without end has to end.
MAX_CALLERS = 128


class ModelCalls:
    """Submits what models ask of models, and keeps them from waiting for each other for ever."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, table: ServingTable, interceptors: Sequence[Interceptor] = ()
    ) -> None:
        self._table = table
        self._single = Entrance(self._resolve, not_by_models, model, interceptors)
        self._any_number = Entrance(self._resolve, None, model, interceptors)
        self._deadlocks = DeadlockDetector(loop, self._break_deadlock)
        self._refusals: dict[Ticket, HeadraceError] = {}

    def submit(self, ticket: Ticket, worker: Worker | None) -> None:
        """Have ``ticket`` answered; a refusal is an answer, in Triton's words. ``worker`` waits for it,
        or None: a scheduler, or an instance that is being loaded."""
        request, respond = ticket.request, ticket.respond
        try:
            if len(request.callers) > MAX_CALLERS:
                raise InvalidArgument(
                    f"{len(request.callers)} models wait for this request, one behind the other; the limit is "
                    f"{MAX_CALLERS}"
                )
            entrance = self._any_number if request.decoupled else self._single
            view = entrance.find(request.model_name, request.model_version)
            ticket.respond = partial(self._respond, ticket, respond, worker)
            self._start_for(worker, entrance, view, ticket)
        except HeadraceError as error:
            respond(_refused(request, error), True)
        except Exception as error:
            log.exception("a request to model '%s' failed", request.model_name)
            respond(_refused(request, InternalError(summary(error))), True)

    async def is_ready(self, name: str, version: str) -> bool:
        """Whether requests to that version (empty: the latest) would be taken; False if there is none.

        Raises `InvalidArgument` for a version that is no number.
        """
        return await self._table.is_ready(self._table.served_loaded, name, version)

    def _start_for(self, worker: Worker | None, entrance: Entrance, view: ModelView, ticket: Ticket) -> None:
        target = self._table.served_loaded(ticket.request.model_name, ticket.request.model_version)
        self._deadlocks.add(worker, ticket, target)  # before it can be answered
        try:
            entrance.start(view, ticket)
        except BaseException:
            self._deadlocks.discard(worker, ticket)
            raise

    def _resolve(self, name: str, version: str) -> ModelView:
        try:
            return self._table.resolve_loaded(name, version)
        except HeadraceError as error:
            raise type(error)(
                f"Failed for execute the inference request. Model '{name}' is not ready. {error.message}"
            ) from error

    def _respond(self, ticket: Ticket, respond: Respond, worker: Worker | None, answer: Answer, final: bool) -> None:
        if final:
            self._deadlocks.discard(worker, ticket)
            answer = self._refusals.pop(ticket, answer)
            ticket.respond = respond  # else they would hold each other until they are collected
        respond(answer, final)

    def _break_deadlock(self, ticket: Ticket, path: Sequence[str]) -> None:
        """Take ``ticket``, which nobody could ever answer, out of its queue."""
        shown = " -> ".join(f"'{name}'" for name in path)
        self._refusals[ticket] = _refused(
            ticket.request,
            Unavailable(
                f"every instance of model '{ticket.request.model_name}' waits, directly or through others, for this "
                f"request: {shown}. More instances would help, or one call less"
            ),
        )
        ticket.cancel()


def _refused(request: InferRequest, error: HeadraceError) -> HeadraceError:
    return HeadraceError(f"Model {request.model_name} - Error when running inference: {error.message}", error.code)
