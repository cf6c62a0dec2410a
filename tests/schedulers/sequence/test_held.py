"""Triton's variables for tests of a server hold the requests of sequences, too."""

from __future__ import annotations

import asyncio
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from headrace import Answer, InferRequest, InferResponse, Server, Ticket
from headrace_testing.serving import on_loop, serve

CONFIG = """backend: "identity" sequence_batching { }
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }"""


def test_nothing_runs_until_enough_requests_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text(CONFIG)
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "2")
    monkeypatch.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", "1")

    async def scenario() -> None:
        responses: list[Answer] = []
        done = asyncio.Event()

        def on_answer(answer: Answer, final: bool) -> None:
            responses.append(answer)
            if len(responses) == 4:
                done.set()

        def send(name: int, start: bool, end: bool) -> None:
            inputs = {"x": np.ones(1, np.float32)}
            server.submit(
                Ticket(InferRequest("m", inputs, sequence_id=name, sequence_start=start, sequence_end=end), on_answer)
            )

        model_queue = server.served("m")[0].model_queue
        for waiting, (start, end) in enumerate(((True, False), (False, False), (False, True)), 1):
            send(1, start, end)
            for _ in range(20):
                await asyncio.sleep(0)
            assert (responses, model_queue.pending) == ([], waiting)
        send(2, True, True)
        await done.wait()
        assert all(isinstance(answer, InferResponse) for answer in responses)

    with Server(tmp_path) as server:
        on_loop(server, scenario())


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_a_client_gets_the_batches_of_held_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """The batches equal those of a real Triton 2.51 with ``direct``.

    With ``oldest``, Triton waits forever, because its batcher counts only one waiting request of a sequence.
    """
    (tmp_path / "m/1").mkdir(parents=True)
    slots = f"max_batch_size: 2 sequence_batching {{ {strategy} {{ }} }} instance_group {{ kind: KIND_CPU count: 1 }}"
    (tmp_path / "m/config.pbtxt").write_text(CONFIG.replace("sequence_batching { }", slots))
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "4")
    monkeypatch.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", "2")
    x = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    x.set_data_from_numpy(np.ones((1, 1), np.float32))
    answers: queue.Queue[Any] = queue.Queue()
    with (
        serve(tmp_path, listen=True) as server,
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as client,
    ):
        client.start_stream(lambda result, error: answers.put(error or result.get_response().id))
        for sequence in (1, 2, 3):
            for step, flag in enumerate(("sequence_start", "sequence_end")):
                options = {"sequence_id": sequence, flag: True}
                client.async_stream_infer("m", [x], request_id=f"{sequence}.{step}", **options)
        responses = [answers.get(timeout=90) for _ in range(6)]
        assert sorted(responses) == ["1.0", "1.1", "2.0", "2.1", "3.0", "3.1"]
        (model,) = client.get_inference_statistics("m").model_stats
        assert {batch.batch_size: batch.compute_infer.count for batch in model.batch_stats} == {1: 2, 2: 2}
        client.stop_stream()
