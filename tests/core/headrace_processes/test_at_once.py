"""An instance that waits for another model gets the answer even if the event loop is blocked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace.messages.response import Answer, InferResponse

if TYPE_CHECKING:
    from tests.core.headrace_processes.conftest import Running

    Run = Callable[..., Running]
    WaitUntil = Callable[..., None]


@pytest.mark.parametrize("busy_poll", [0, 300])
@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_an_answer_does_not_wait_for_the_loop(
    run_trial: Run,
    write_callee: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: WaitUntil,
    isolation: str,
    busy_poll: int,
) -> None:
    is_held, may_go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        is_held.set()
        while not may_go_on.is_set():  # a wait would be noticed by the guard of the loop
            pass

    def hold_the_loop(folder: Path, request: Any) -> None:
        model.server.loop.call_soon_threadsafe(stand_still)
        assert is_held.wait(10)

    monkeypatch.setitem(import_module("trial_backend").DEEDS, "hold the loop", hold_the_loop)
    write_callee("hold the loop")
    poll = {"busy_poll_microseconds": busy_poll} if isolation == "process" else {}
    model = run_trial(instance_kind="asker", isolation=isolation, **poll)
    answers: list[Answer] = []
    model.submit(lambda answer, final: answers.append(answer))
    try:
        wait_until((tmp_path / "answered").exists, "the asker has its answer")
        assert is_held.is_set()
        assert not answers  # it is the loop that would say so
    finally:
        may_go_on.set()
    wait_until(lambda: bool(answers), "the request is answered")
    (answer,) = answers
    assert isinstance(answer, InferResponse)
    assert np.asarray(answer.outputs["y"]).tolist() == [[2.0, 2.0]]
    assert [served.model_queue.in_flight for served in model.server.served("callee")] == [0]


@pytest.mark.parametrize("as_timeout", [False, True])
def test_a_call_interrupted_by_an_alarm_does_not_take_the_answers_of_later_ones(
    run_trial: Run, write_callee: Callable[[str], None], as_timeout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(import_module("trial_backend").DEEDS, "hold the loop", lambda folder, request: sleep(0.06))
    write_callee("hold the loop")
    model = run_trial(instance_kind="asker")
    for number in range(4):
        x = np.full((1, 2), number, np.float32)
        response = model.server.infer("m", {"x": x}, parameters={"interrupted": 2, "as_timeout": as_timeout})
        assert np.asarray(response.outputs["y"]).tolist() == (x + 1).tolist()
    assert model.executor.restarts == 0
