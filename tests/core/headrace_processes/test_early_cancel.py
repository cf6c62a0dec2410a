"""A request may be cancelled before its process has it: cancellations are sent on a separate socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from headrace.messages.response import Answer

if TYPE_CHECKING:
    from tests.core.headrace_processes.conftest import Running

    Run = Callable[..., Running]

TRIALS = 100


def test_a_request_that_is_cancelled_at_once_does_not_run_for_ever(run_trial: Run) -> None:
    """Each execution ends only when it is cancelled, and the next one waits for it."""
    model = run_trial(isolation="process")
    answers: SimpleQueue[Answer] = SimpleQueue()

    async def leave_while_it_is_sent(ticket: Any) -> None:
        while not ticket.on_cancel:  # set when the request is sent
            await asyncio.sleep(0)
        ticket.cancel()

    for _ in range(TRIALS):
        ticket = model.submit(lambda answer, final: answers.put(answer), do="until cancelled")
        asyncio.run_coroutine_threadsafe(leave_while_it_is_sent(ticket), model.server.loop).result(30)
        answers.get(timeout=10)
