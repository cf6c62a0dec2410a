"""The model queue of models that may run a request more than once.

A request that its model returns waits again before `Scheduler.next` is called for the instance. So it can join the
requests that have arrived meanwhile. Each run is an execution of its own, in the statistics and for the rate limiter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import Cancelled, HeadraceError, InternalError, Rescheduled, Unavailable, summary
from headrace.messages.response import Answer, InferResponse
from headrace.messages.tensor import Tensor
from headrace.messages.ticket import UNREAD, Ticket
from headrace.schedulers.base import Clock, ScheduledModel, Scheduler, full_scheduler_class
from headrace.schedulers.instance_source import InstanceSource, Limiter
from headrace.schedulers.model_queue import STOPPING, ModelQueue
from headrace.telemetry.log_limits import rate_limited_logger
from headrace.telemetry.statistics import ModelStatistics

log = rate_limited_logger(__name__)

_NOTHING: Mapping[str, Tensor] = {}


class ReschedulingModelQueue(ModelQueue):
    """A `ModelQueue` for a scheduler that `FullScheduler.reschedules`. Event loop only.

    If a caller has `UNREAD` unread responses, the request waits between two runs until half of them are read. For its
    scheduler, it is still running. Within a run, the executor makes it wait.
    """

    def __init__(
        self,
        kind: type[Scheduler],
        model: ScheduledModel,
        statistics: ModelStatistics,
        loop: asyncio.AbstractEventLoop,
        clock: Clock | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        super().__init__(kind, model, statistics, loop, clock, limiter)
        #: The kept outputs of the last response of each running request.
        self._last_outputs: dict[Ticket, Mapping[str, Tensor]] = {}
        #: The requests that wait until their callers have read more, and the source of the instance that ran each.
        self._waiting_for_reader: dict[Ticket, InstanceSource] = {}

    def progress(self, ticket: Ticket, response: Answer) -> None:
        ticket.unread += 1
        if self.kept and isinstance(response, InferResponse):
            self._last_outputs[ticket] = response.outputs
        super().progress(ticket, response)

    def finish_and_deliver(
        self, source: InstanceSource | None, tickets: Sequence[Ticket], answers: Sequence[Answer]
    ) -> None:
        """Requeue the requests that are rescheduled, and deliver the last answers of the others."""
        if source is not None and any(isinstance(answer, Rescheduled) for answer in answers):
            finished: list[tuple[Ticket, Answer]] = []
            for ticket, answer in zip(tickets, answers, strict=True):
                if not isinstance(answer, Rescheduled):
                    finished.append((ticket, answer))
                elif (error := self._reschedule(source, ticket)) is not None:
                    finished.append((ticket, error))
            if not finished:
                self.ask_again()
                return
            tickets, answers = [ticket for ticket, _ in finished], [answer for _, answer in finished]
        for ticket in tickets if self._last_outputs else ():
            self._last_outputs.pop(ticket, None)
        super().finish_and_deliver(source, tickets, answers)

    def _reschedule(self, source: InstanceSource, ticket: Ticket) -> HeadraceError | None:
        """Requeue ``ticket`` now, or when its caller has read enough. Or return the error that it gets."""
        if self.closed:
            return Unavailable(f"{ticket.request.log_id}{STOPPING}")
        if ticket.cancelled:
            return self._cancelled(ticket)
        if ticket.unread < UNREAD:
            return self._requeue(source, ticket)
        self._waiting_for_reader[ticket] = source
        ticket.on_cancel, ticket.on_read = self._on_cancel, self._response_read
        return None

    def _requeue(self, source: InstanceSource, ticket: Ticket) -> HeadraceError | None:
        # The next run may be on another executor, so the callbacks and times of this run are reset.
        ticket.on_cancel, ticket.on_read, ticket.started_ns, ticket.deadline_ns = self._on_cancel, None, 0, 0
        ticket.arrival_ns = ticket.queued_ns = self._now_ns()
        try:
            level = self.full_scheduler.rescheduled(ticket, self._last_outputs.pop(ticket, _NOTHING), source.instance)
        except HeadraceError as error:
            return error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            log.exception("scheduler '%s' raised an exception in rescheduled()", self.scheduler.name)
            return InternalError(summary(error))
        if (timer := self._timers.pop(ticket, None)) is not None:
            timer.cancel()
        if level == 0:
            ticket.on_cancel = self._cancel_own
            return None
        self.queue.add(ticket, level or 1)
        if ticket.deadline_ns:
            self._start_timer(ticket)
        return None

    def _response_read(self, ticket: Ticket) -> None:
        if ticket.unread <= UNREAD // 2:
            source = self._waiting_for_reader.pop(ticket)
            self._finish_or_ask(source, ticket, self._requeue(source, ticket))

    def _cancel(self, ticket: Ticket) -> None:
        if (source := self._waiting_for_reader.pop(ticket, None)) is not None:
            self._finish_or_ask(source, ticket, self._cancelled(ticket))
        else:
            super()._cancel(ticket)

    def _cancelled(self, ticket: Ticket) -> Cancelled:
        self._count(ticket, self.statistics.cancelled)
        return Cancelled(f"{ticket.request.log_id}request was cancelled")

    def _finish_or_ask(self, source: InstanceSource, ticket: Ticket, error: HeadraceError | None) -> None:
        if error is not None:
            self.finish_and_deliver(source, (ticket,), (error,))
        else:
            self.ask_again()


def model_queue_class(kind: type[Scheduler], config: ModelConfig) -> type[ModelQueue]:
    """Return the class of model queue that runs a scheduler of class ``kind``, for a model with ``config`` and without
    response cache."""
    return ReschedulingModelQueue if full_scheduler_class(kind).reschedules(config) else ModelQueue
