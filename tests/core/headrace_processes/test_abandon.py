"""A server that waits no longer answers everybody, whatever its instances are at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from headrace.errors import Unavailable
from headrace.messages.response import Answer

if TYPE_CHECKING:
    from tests.core.headrace_processes.conftest import Running

    Run = Callable[..., Running]
    WaitUntil = Callable[..., None]


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_all_requests_of_an_abandoned_model_are_answered_and_no_other_is_executed(
    run_trial: Run, wait_until: WaitUntil, isolation: str
) -> None:
    model = run_trial(isolation=isolation)
    (served,) = model.server.served("m")
    answers: SimpleQueue[tuple[str, Answer, bool]] = SimpleQueue()

    def note(name: str, answer: Answer, final: bool) -> None:
        answers.put((name, answer, final))

    for name, deed in (("running", "until cancelled"), ("waiting", "touch"), ("last", "touch")):
        model.submit(partial(note, name), do=deed)
        wait_until((model.folder / "running").exists, "the first request is executed")
    model.on_loop(served.abandon)
    received = [answers.get(timeout=10) for _ in range(3)]
    assert sorted(name for name, _, _ in received) == ["last", "running", "waiting"]
    for _, answer, final in received:
        assert isinstance(answer, Unavailable)
        assert answer.message == "[request id: <id_unknown>] Server is stopping"
        assert final
    wait_until((model.folder / "cancelled").exists, "the execution sees that it is cancelled")
    model.stop()  # which waits for nothing
    assert not (model.folder / "touched").exists()
    assert answers.empty()


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_stream_of_an_abandoned_model_ends_at_its_next_response(run_trial: Run, isolation: str) -> None:
    model = run_trial(
        instance_kind="stream", isolation=isolation, config="model_transaction_policy { decoupled: true }"
    )
    (served,) = model.server.served("m")
    answers: SimpleQueue[tuple[Answer, bool]] = SimpleQueue()
    # 64 unread responses, and then the model waits.
    model.submit(lambda answer, final: answers.put((answer, final)), count=1_000_000)
    seen = [answers.get(timeout=10) for _ in range(10)]
    assert not any(final for _, final in seen)
    model.on_loop(served.abandon)
    while not (last := answers.get(timeout=10))[1]:
        continue
    assert isinstance(last[0], Unavailable)
    model.stop()
    assert answers.empty()
