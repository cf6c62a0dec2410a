"""The requests of a decoupled model between submit and answer, with a count of each response."""

from __future__ import annotations

from time import monotonic_ns

from headrace.errors import HeadraceError
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.schedulers.in_flight import InFlightTracker, write
from headrace.telemetry.response_statistics import MOST_COUNTED, ResponseStatistics


class ResponseTracker(InFlightTracker):
    """An `InFlightTracker` that records every response in ``statistics``. Event loop only."""

    def __init__(self, ordered: bool, statistics: ResponseStatistics) -> None:
        super().__init__(ordered, caller_reads=True)
        self._record = statistics.record
        #: Per request with a response: the number of responses, and the time at which the last one was passed on.
        self._delivered: dict[Ticket, tuple[int, int]] = {}

    def progress(self, ticket: Ticket, response: Answer) -> None:
        if ticket in self.open:
            given_ns = monotonic_ns()
            write(ticket, response, False)
            self._note(ticket, response, given_ns)

    def _finish(self, ticket: Ticket, answer: Answer) -> None:
        is_open, given_ns = ticket in self.open, monotonic_ns()
        super()._finish(ticket, answer)
        if is_open:
            self._note(ticket, answer, given_ns)
            self._delivered.pop(ticket, None)

    def _note(self, ticket: Ticket, answer: Answer, given_ns: int) -> None:
        """Count a response that the model gave at ``given_ns`` and that has been passed on."""
        before = self._delivered.get(ticket)
        index, began_ns = (0, ticket.started_ns) if before is None else before
        passed_ns = monotonic_ns()
        self._delivered[ticket] = index + 1, passed_ns
        if not began_ns:
            if isinstance(answer, HeadraceError):
                return  # it has not been executed
            began_ns = ticket.queued_ns
        if index < MOST_COUNTED:
            self._record(index, ticket, answer, began_ns, given_ns, passed_ns)
