"""Statistics of the responses of a decoupled model, by the index of a response among those to its request.

Source: docs/spec/behaviours.md section 1.6.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import Code, HeadraceError
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.first_responses import FirstResponseTimes

#: Only this many responses of a request are counted, because a stream may be endless.
MOST_COUNTED = 1000
_NAMES = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
#: Index of the count of a name in a row; its nanoseconds follow. Indexes 0 to 3 are compute_infer and compute_output.
_SUCCESS, _FAIL, _EMPTY, _CANCEL = 4, 6, 8, 10


class ResponseStatistics:
    """Counts and nanoseconds for each index from 0, and a histogram of the first responses.

    Only the event loop writes. Any thread may call `document` and read ``first``.
    """

    __slots__ = ("_rows", "first")

    def __init__(self, first: FirstResponseTimes | None = None) -> None:
        self._rows: list[list[int]] = []
        self.first = FirstResponseTimes() if first is None else first

    def record(self, index: int, ticket: Ticket, answer: Answer, began_ns: int, given_ns: int, passed_ns: int) -> None:
        """Count the response with ``index`` to ``ticket``.

        The times: its computation began, the model gave it, it was passed on.
        """
        rows = self._rows
        if index == len(rows):
            rows.append([0] * 12)
        row = rows[index]
        if answer is None:
            outcome = _EMPTY
        elif not isinstance(answer, HeadraceError):
            outcome = _SUCCESS
            if not index:
                self.first.record(given_ns - ticket.arrival_ns)
        else:
            outcome = _CANCEL if ticket.cancelled and answer.code is Code.CANCELLED else _FAIL
        row[outcome] += 1
        row[outcome + 1] += passed_ns - began_ns
        if outcome <= _FAIL:
            row[0] += 1
            row[1] += given_ns - began_ns
            row[2] += 1
            row[3] += passed_ns - given_ns

    def document(self) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Return the statistics in the form of the statistics endpoint."""
        return {
            str(index): {name: {"count": row[2 * at], "ns": row[2 * at + 1]} for at, name in enumerate(_NAMES)}
            for index, row in enumerate(tuple(self._rows))
        }
