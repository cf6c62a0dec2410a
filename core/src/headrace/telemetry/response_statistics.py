"""What a decoupled model has answered, by the place of a response among those to its request.

Source: docs/spec/behaviours.md section 1.6.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import Code, HeadraceError
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.first_responses import FirstResponseTimes

#: Responses of one request that are counted: a stream may be endless.
MOST_COUNTED = 1000
_NAMES = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
#: Where the count of a name is; its nanoseconds are behind it. Those of computing and of the output are the first four.
_SUCCESS, _FAIL, _EMPTY, _CANCEL = 4, 6, 8, 10


class ResponseStatistics:
    """Counts and nanoseconds of each index, from 0, and how long the first responses took.

    Written on the event loop. The `document` and the times of ``first`` may be read on any thread.
    """

    __slots__ = ("_rows", "first")

    def __init__(self, first: FirstResponseTimes | None = None) -> None:
        self._rows: list[list[int]] = []
        self.first = FirstResponseTimes() if first is None else first

    def record(self, index: int, ticket: Ticket, answer: Answer, began_ns: int, given_ns: int, passed_ns: int) -> None:
        """Count the response number ``index`` to ``ticket``, by when its computing began, when the model gave it, and
        when it was passed on."""
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
        """Return them as the statistics endpoint shows them."""
        return {
            str(index): {name: {"count": row[2 * at], "ns": row[2 * at + 1]} for at, name in enumerate(_NAMES)}
            for index, row in enumerate(tuple(self._rows))
        }
