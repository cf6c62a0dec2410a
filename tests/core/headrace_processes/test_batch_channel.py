"""A process and its server poll for the next message as long as the model allows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace.messages.response import Answer, InferResponse
from headrace_processes.batch_channel import BatchChannel
from headrace_processes.ipc import busy_poll
from headrace_processes.ipc.codec import Decoder, Encoder
from headrace_processes.ipc.framing import FrameParser
from headrace_processes.ipc.replies import reply_of
from tests.core.conftest import make_ticket

if TYPE_CHECKING:
    from tests.core.headrace_processes.conftest import Running

    Run = Callable[..., Running]
    WaitUntil = Callable[..., None]


@pytest.mark.parametrize("busy_poll", [0, 1_000_000])
def test_a_process_polls_as_long_as_its_model_allows(run_trial: Run, busy_poll: int) -> None:
    model = run_trial(load="count looks", busy_poll_microseconds=busy_poll)
    model.infer()
    sleep(0.01)
    assert (model.number("looks") > 0) is (busy_poll > 0)


def test_a_process_sleeps_after_a_batch_of_many(run_trial: Run, tmp_path: Path, wait_until: WaitUntil) -> None:
    """Two requests wait while a third is executed, and are sent to the process together."""
    config = "dynamic_batching { }"
    model = run_trial(load="count looks", config=config, busy_poll_microseconds=1_000_000)
    answers: list[InferResponse] = []

    def respond(answer: Answer, final: bool) -> None:
        assert isinstance(answer, InferResponse)
        answers.append(answer)

    model.submit(respond, do="gate")
    wait_until((tmp_path / "running").exists, "the first is executed")
    for _ in range(2):
        model.submit(respond, do="looks")
    (tmp_path / "open").touch()
    wait_until(lambda: len(answers) == 3, "all are answered")
    sleep(0.01)
    _, *both = [int(np.asarray(answer.outputs["n"])[0, 0]) for answer in answers]
    assert [model.number("looks")] * 2 == both


@pytest.mark.parametrize("busy_poll", [0, 1_000_000])
def test_wait_for_another_model_polls_as_long(
    run_trial: Run, write_callee: Callable[[str], None], tmp_path: Path, wait_until: WaitUntil, busy_poll: int
) -> None:
    write_callee("gate")
    settings = {"load": "count looks", "busy_poll_microseconds": busy_poll}
    model = run_trial(instance_kind="asker", options={"exit_timeout_secs": 5}, **settings)
    answers: list[Answer] = []
    model.submit(lambda answer, final: answers.append(answer))
    wait_until((tmp_path / "running").exists, "the other model executes")
    sleep(0.01)
    (tmp_path / "open").touch()
    wait_until(lambda: bool(answers), "the request is answered")
    assert (int((tmp_path / "answered").read_text()) > 0) is (busy_poll > 0)


class SilentPeer:
    """A transport and sink that do nothing."""

    def write(self, message: bytes) -> None:
        """Discard the message."""

    def batch_done(self, *of: object) -> None:
        """It is not needed."""


@pytest.mark.parametrize(("size", "looks"), [(1, 30), (2, 0)])
def test_the_loop_stays_awake_for_single_requests(monkeypatch: pytest.MonkeyPatch, size: int, looks: int) -> None:
    clock = [1_000_000]
    monkeypatch.setattr(busy_poll, "monotonic_ns", lambda: clock[-1])
    monkeypatch.setattr(os, "sched_yield", lambda: clock.append(clock[-1] + 10_000))

    async def scenario() -> None:
        peer: Any = SilentPeer()
        batches = BatchChannel("m", Encoder(None), Decoder(None, lambda offset: None), peer, peer.write, peer, 300)
        first, *batch = [make_ticket() for _ in range(size + 1)]
        batches.run([first])
        answers = Encoder(None).answers([reply_of(1, None, True)], (1, 2, 3, 4))
        for message in FrameParser().feed(answers):
            batches.done(message)
        batches.run(batch)
        await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert len(clock) - 1 == looks
