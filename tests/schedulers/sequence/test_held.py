"""Triton's variables for tests of a server hold the requests of sequences, too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from headrace import Answer, InferRequest, InferResponse, Server, Ticket
from headrace.testing.serving import on_loop

CONFIG = """backend: "identity" sequence_batching { }
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }"""


def test_nothing_runs_until_enough_wait_in_slots_and_in_the_backlog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text(CONFIG)
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "2")
    monkeypatch.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", "1")

    async def scene() -> None:
        told: list[Answer] = []
        done = asyncio.Event()

        def hear(answer: Answer, final: bool) -> None:
            told.append(answer)
            if len(told) == 4:
                done.set()

        def send(name: int, start: bool, end: bool) -> None:
            inputs = {"x": np.ones(1, np.float32)}
            server.submit(
                Ticket(InferRequest("m", inputs, sequence_id=name, sequence_start=start, sequence_end=end), hear)
            )

        kernel = server.served("m")[0].scheduler
        for waiting, (start, end) in enumerate(((True, False), (False, False), (False, True)), 1):
            send(1, start, end)
            for _ in range(20):
                await asyncio.sleep(0)
            assert (told, kernel.pending) == ([], waiting)
        send(2, True, True)
        await done.wait()
        assert all(isinstance(answer, InferResponse) for answer in told)

    with Server(tmp_path) as server:
        on_loop(server, scene())
