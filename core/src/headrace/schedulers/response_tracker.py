"""The requests of a decoupled model between submit and answer, with a count of each response."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

from headrace.errors import HeadraceError
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.schedulers.in_flight import InFlightTracker, write
from headrace.telemetry.response_statistics import MOST_COUNTED, ResponseStatistics


class ResponseTracker(InFlightTracker):
    """An `InFlightTracker` that notes every response in ``statistics``. Event loop only.

    ``first`` is called with each request when its first response is given, unless that is an error.
    """

    def __init__(
        self, ordered: bool, statistics: ResponseStatistics, first: Callable[[Ticket], None] | None = None
    ) -> None:
        super().__init__(ordered, counted=True)
        self._record, self._first = statistics.record, first
        #: Of requests that have a response: how many, and when the last one was passed on.
        self._given: dict[Ticket, tuple[int, int]] = {}

    def progress(self, ticket: Ticket, response: Answer) -> None:
        if ticket in self.open:
            given_ns = monotonic_ns()
            if self._first is not None:
                self._tell_first(ticket, response)
            write(ticket, response, False)
            self._note(ticket, response, given_ns)

    def _finish(self, ticket: Ticket, answer: Answer) -> None:
        is_open, given_ns = ticket in self.open, monotonic_ns()
        if is_open and self._first is not None:
            self._tell_first(ticket, answer)
        super()._finish(ticket, answer)
        if is_open:
            self._note(ticket, answer, given_ns)
            self._given.pop(ticket, None)

    def _tell_first(self, ticket: Ticket, response: Answer) -> None:
        if self._first is not None and ticket not in self._given and isinstance(response, InferResponse):
            self._first(ticket)

    def _note(self, ticket: Ticket, answer: Answer, given_ns: int) -> None:
        """Count a response that the model gave at ``given_ns`` and that has been passed on."""
        before = self._given.get(ticket)
        index, began_ns = (0, ticket.started_ns) if before is None else before
        passed_ns = monotonic_ns()
        self._given[ticket] = index + 1, passed_ns
        if not began_ns:
            if isinstance(answer, HeadraceError):
                return  # it has not been executed
            began_ns = ticket.queued_ns
        if index < MOST_COUNTED:
            self._record(index, ticket, answer, began_ns, given_ns, passed_ns)
