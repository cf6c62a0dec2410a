"""A raised `BaseException` that is no `Exception` fails its request or its load, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from headrace.errors import HeadraceError
from headrace.messages.response import Answer

if TYPE_CHECKING:
    from tests.core.headrace_processes.conftest import Running

    Run = Callable[..., Running]

DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("instance_kind", ["rows", "requests", "stream", "iterator", "accept"])
def test_an_execution_that_raises_it_is_answered_and_the_instance_lives_on(
    run_trial: Run,
    isolation: str,
    instance_kind: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = import_module("trial_backend")
    monkeypatch.setattr(trial, "_stray", iter(trial.KINDS))
    decoupled = instance_kind in ("stream", "iterator")
    model = run_trial(
        instance_kind=f"stray {instance_kind}", isolation=isolation, config=DECOUPLED if decoupled else ""
    )
    answers: SimpleQueue[tuple[Answer, bool]] = SimpleQueue()
    for kind in trial.KINDS:
        model.submit(lambda answer, final: answers.put((answer, final)))
        received = [answers.get(timeout=10) for _ in range(2 if instance_kind == "iterator" else 1)]
        last, final = received[-1]
        assert isinstance(last, HeadraceError)
        assert last.message == f"model 'm' failed to execute: {kind.__name__}: stray"
        assert final
    assert model.executor.alive
    assert model.executor.restarts == 0
    assert model.server.served("m")[0].snapshot().backend_failures.count == len(trial.KINDS)
    model.stop()
    lines = [record for record in caplog.messages if "model 'm' version 1 failed to execute" in record]
    assert len(lines) == len(trial.KINDS)
