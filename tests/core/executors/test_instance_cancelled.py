"""A batch whose requests are cancelled before it runs, and while it runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from headrace.errors import Cancelled
from headrace.executors.instance import run_batch
from headrace.executors.output_schema import OutputSchema
from headrace.executors.runner import Returned, Runner
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Ticket
from headrace.telemetry.executions import BatchTimes
from tests.core.conftest import make_ticket


class Leaving(Runner):
    """Answers each by its own id; meanwhile the callers of ``leaving`` go."""

    def __init__(self, leaving: Sequence[Ticket]) -> None:
        super().__init__(OutputSchema("m", "1", {}, True))
        self.leaving = leaving

    def run(self, batch: Sequence[Ticket]) -> tuple[Sequence[Returned], BatchTimes]:
        for ticket in self.leaving:
            ticket.cancel()
        return [InferResponse({}, id=ticket.request.id) for ticket in batch], BatchTimes(0, 0, 0, 0)


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("meanwhile", range(4))
def test_requests_get_their_own_answers_when_others_are_cancelled(before: int, meanwhile: int) -> None:
    tickets = [make_ticket("m", {"x": np.ones(1)}, id=str(number)) for number in range(4)]
    tickets[before].cancel()
    answers, _ = run_batch(Leaving([tickets[meanwhile]]), tickets)
    assert len(answers) == len(tickets)
    for number, answer in enumerate(answers):
        if number == before:
            assert isinstance(answer, Cancelled)
        else:
            assert isinstance(answer, InferResponse)
            assert answer.id == str(number)
