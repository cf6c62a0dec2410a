"""An instance in a process answers as it would in a thread. Every test starts real processes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from headrace.config.config_json import config_to_json
from headrace.errors import Cancelled, Code, HeadraceError, InvalidArgument
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import UNREAD
from headrace_processes import launch

if TYPE_CHECKING:
    from tests.core.headrace_processes.conftest import Running

    Run = Callable[..., Running]
    WaitUntil = Callable[..., None]

BATCHING = "dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 20000000 }"


def y(response: InferResponse) -> Any:
    return np.asarray(response.outputs["y"])


def n(response: InferResponse) -> int:
    return int(np.asarray(response.outputs["n"])[0, 0])


def exists(pid: int) -> bool:
    """Return True if the process ``pid`` runs. A zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_is_sent_is_true_for_a_config_of_a_load_request(run_trial: Run, isolation: str) -> None:
    model = run_trial(isolation=isolation, options={"model_control_mode": "explicit", "load_model": ("m",)})
    note = model.folder / "is_sent"
    assert note.read_text() == "False"
    sent = {**config_to_json(model.server.resolve("m").config), "max_batch_size": 4}
    load = model.server.load("m", {"config": json.dumps(sent)})
    asyncio.run_coroutine_threadsafe(load, model.server.loop).result(30)
    assert note.read_text() == "True"


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_schedulers_get_the_duration_of_an_execution(run_trial: Run, isolation: str) -> None:
    model = run_trial(isolation=isolation)
    occupancy = model.server.served("m")[0].model_queue
    assert occupancy.last_ns == 0
    began_ns = monotonic_ns()
    model.infer()
    assert 0 < occupancy.last_ns < monotonic_ns() - began_ns


# ---------------------------------------------------------------------- answers


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("instance_kind", ["rows", "requests", "deferred"])
def test_every_instance_kind_answers_alike_in_a_process_and_in_a_thread(
    run_trial: Run, instance_kind: str, isolation: str
) -> None:
    model = run_trial(instance_kind=instance_kind, isolation=isolation)
    for rows, columns in ((1, 0), (1, 1), (8, 3), (2, 40_000)):
        x = np.random.default_rng(rows).random((rows, columns), np.float32)
        response = model.infer(x=x)
        assert (response.model_name, response.model_version, list(response.outputs)) == ("m", "1", ["y", "n"])
        assert np.array_equal(y(response), x + np.float32(1))
    assert list(model.infer(outputs=["n"]).outputs) == ["n"]
    if instance_kind == "rows":
        with pytest.raises(HeadraceError, match=r"^a row is not a number$") as caught:
            model.infer(x=[[float("nan")]])
        assert caught.value.code is Code.INVALID_ARGUMENT
    else:
        with pytest.raises(HeadraceError, match=r"^no such thing$") as caught:
            model.infer("refuse")
        assert caught.value.code is Code.NOT_FOUND
        assert (model.number("pid") == os.getpid()) is (isolation == "thread")


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_an_execution_that_raises_is_worded_alike(run_trial: Run, isolation: str) -> None:
    model = run_trial(isolation=isolation)
    with pytest.raises(HeadraceError, match=r"^model 'm' failed to execute: ValueError: raised on purpose$"):
        model.infer("raise")
    assert model.infer()


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("step", ["share", "load", "warm_up"])
def test_a_load_that_raises_is_worded_alike(
    run_trial: Run, step: str, isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    reason = run_trial(isolation=isolation, **{step: "raise"}).reason
    assert reason == "Internal: backend 'trial' failed to load 'm': ValueError: raised on purpose"
    assert caplog.text.count('raise ValueError("raised on purpose")') == 1  # where it was, for the operator


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_an_instance_that_cannot_be_warmed_up_is_closed(run_trial: Run, isolation: str) -> None:
    model = run_trial(isolation=isolation, warm_up="raise", close="touch")
    assert model.reason
    assert (model.folder / "touched").exists()


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_refusal_to_warm_up_keeps_its_own_words(run_trial: Run, isolation: str) -> None:
    assert run_trial(isolation=isolation, warm_up="refuse").reason == "Not found: no such thing"


def test_requests_that_wait_together_are_one_batch_in_the_child(run_trial: Run) -> None:
    model = run_trial(config=BATCHING)

    async def ask() -> list[InferResponse]:
        x = {"x": np.ones((1, 1), np.float32)}
        return await asyncio.gather(*(model.server.infer_async("m", x) for _ in range(8)))

    assert [n(response) for response in asyncio.run(ask())] == [8] * 8
    assert model.server.served("m")[0].snapshot().executions.execution_count == 1


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_cancelled_request_notifies_its_execution_and_keeps_the_batch_whole(
    run_trial: Run, wait_until: WaitUntil, isolation: str
) -> None:
    model = run_trial(instance_kind="deferred", isolation=isolation, config=BATCHING.replace("size: 8", "size: 2"))
    answers: SimpleQueue[tuple[str, Answer]] = SimpleQueue()
    cancelled = model.submit(lambda answer, final: answers.put(("gone", answer)), do="until cancelled")
    model.submit(lambda answer, final: answers.put(("other", answer)))
    who, answer = answers.get(timeout=10)
    assert (who, type(answer)) == ("other", InferResponse)
    wait_until((model.folder / "running").exists, "it runs")
    model.on_loop(cancelled.cancel)
    who, answer = answers.get(timeout=10)
    assert who == "gone"
    assert isinstance(answer, HeadraceError)
    assert answer.code is Code.CANCELLED
    wait_until((model.folder / "cancelled").exists, "the execution has heard of it")
    counted = model.server.served("m")[0].snapshot()
    assert (counted.success.count, counted.cancelled.count, counted.backend_failures.count) == (1, 1, 0)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_stream_of_a_disconnected_client_is_counted_as_cancelled(run_trial: Run, isolation: str) -> None:
    model = run_trial(
        instance_kind="stream", isolation=isolation, config="model_transaction_policy { decoupled: true }"
    )
    answers: SimpleQueue[tuple[Answer, bool]] = SimpleQueue()
    stream = model.submit(lambda answer, final: answers.put((answer, final)), count=1_000_000)
    assert not answers.get(timeout=10)[1]
    model.on_loop(stream.cancel)
    while not answers.get(timeout=10)[1]:
        continue
    counted = model.server.served("m")[0].snapshot()
    assert (counted.success.count, counted.cancelled.count, counted.backend_failures.count) == (0, 1, 0)


def test_a_cancelled_request_does_not_reach_the_child(run_trial: Run, wait_until: WaitUntil) -> None:
    model = run_trial()
    answers: SimpleQueue[Answer] = SimpleQueue()
    model.submit(lambda answer, final: answers.put(answer), do="gate")
    wait_until((model.folder / "running").exists, "it runs")
    waiting = model.submit(lambda answer, final: answers.put(answer), do="touch")
    model.on_loop(waiting.cancel)
    assert isinstance(answers.get(timeout=10), Cancelled)
    (model.folder / "open").touch()
    assert isinstance(answers.get(timeout=10), InferResponse)
    assert model.infer()
    assert not (model.folder / "touched").exists()


def test_the_priority_and_the_settings_of_a_request_reach_the_child(run_trial: Run) -> None:
    """Also the largest wait that a client may set: it once kept the instance from ever running again."""
    model = run_trial()
    assert n(model.infer("priority", priority=7)) == 7
    assert n(model.infer("priority", priority=2**64 - 1 >> 1)) == 2**63 - 1
    assert model.infer(priority=2**64 - 1, timeout_us=2**64 - 1)


def test_warm_up_samples_run_in_the_child(run_trial: Run) -> None:
    sample = """model_warmup { name: "w" batch_size: 2 count: 3
        inputs { key: "x" value { data_type: TYPE_FP32 dims: [4] zero_data: true } } }"""
    model = run_trial(config=sample)
    assert np.array_equal(y(model.infer()), [[2, 3]])
    assert model.server.served("m")[0].snapshot().executions.execution_count == 1  # warm-ups are not counted


@pytest.mark.parametrize("deed", ["raise", "exit"])
def test_a_warm_up_sample_that_fails_fails_the_load(run_trial: Run, deed: str) -> None:
    sample = """model_warmup { name: "w" batch_size: 1
        inputs { key: "x" value { data_type: TYPE_FP32 dims: [4] zero_data: true } } }"""
    assert "failed to run warmup sample 'w'" in run_trial(config=sample, always=deed).reason


# ---------------------------------------------------------------------- streams


class Reader:
    """A caller that reads when the test calls it."""

    def __init__(self, model: Running, **parameters: Any) -> None:
        self.answers: SimpleQueue[tuple[Answer, bool]] = SimpleQueue()
        self.model = model
        self.request = model.submit(lambda answer, final: self.answers.put((answer, final)), **parameters)

    def next(self) -> tuple[Answer, bool]:
        answer = self.answers.get(timeout=10)
        if not answer[1]:
            self.model.on_loop(self.request.read)
        return answer


DECOUPLED = "model_transaction_policy { decoupled: true }"


def test_a_stream_gives_its_responses_in_order_and_its_end(run_trial: Run) -> None:
    reader = Reader(run_trial(instance_kind="stream", config=DECOUPLED), count=200)
    for index in range(200):
        answer, final = reader.next()
        assert isinstance(answer, InferResponse)
        assert (n(answer), final) == (index, False)
    assert reader.next() == (None, True)


def test_a_model_whose_reader_stops_stops_too(run_trial: Run, wait_until: WaitUntil) -> None:
    model = run_trial(instance_kind="stream", config=DECOUPLED)
    reader = Reader(model, count=10_000)

    def sent() -> int:
        return int((model.folder / "sent").read_text() or 0) if (model.folder / "sent").exists() else 0

    wait_until(lambda: sent() > UNREAD, "it is as far ahead as it may be")
    for _ in range(100):
        reader.next()
    # No further for certain: it may have been stopped on the way, and then waits until half of that is read.
    wait_until(lambda: sent() > UNREAD // 2 + 100, "it goes on")
    model.on_loop(reader.request.cancel)
    while not (last := reader.next())[1]:
        pass
    assert isinstance(last[0], HeadraceError)
    assert last[0].code is Code.CANCELLED
    assert sent() <= UNREAD + 101  # one is made before it is found that it may not be sent


# ---------------------------------------------------------------------- large tensors


def test_tensors_of_any_size_are_returned_unchanged(run_trial: Run) -> None:
    model = run_trial(instance_kind="rows")
    for elements in (1, 8191, 8192, 8193, 1 << 20, 1 << 24):  # up to 64 MiB, each way
        x = np.arange(elements, dtype=np.float32)[None]
        assert np.array_equal(y(model.infer(x=x)), x + np.float32(1)), elements


def test_tensor_without_room_in_the_arena_is_sent_over_the_socket(
    run_trial: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "ARENA_BYTES", 1 << 20)
    model = run_trial(instances=1, instance_kind="deferred", config=BATCHING.replace("20000000", "1000"))

    def ask(seed: int) -> None:
        x = np.random.default_rng(seed).random((1, 150_000 + seed), np.float32)
        assert np.array_equal(y(model.infer(x=x)), x + np.float32(1))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(40)))


# ---------------------------------------------------------------------- the end


@pytest.mark.parametrize("close", ["touch", "raise", "exit", "sleep"])
def test_an_instance_is_closed_and_its_process_ends(run_trial: Run, close: str, tmp_path: Path) -> None:
    model = run_trial(close=close, options={"exit_timeout_secs": 5 if close == "sleep" else 30})
    pid = model.number("pid")
    model.stop()
    assert not exists(pid)
    assert (tmp_path / "touched").exists() is (close == "touch")
    assert (tmp_path / "running").exists() is (close == "sleep")


def test_a_process_may_allocate_what_its_model_allows(run_trial: Run) -> None:
    model = run_trial(memory_limit_bytes=400 << 20)
    pid = model.number("pid")
    with pytest.raises(HeadraceError, match="MemoryError"):
        model.infer("eat")
    assert model.number("pid") == pid


def test_objects_of_a_load_are_frozen_after_its_garbage_is_collected(run_trial: Run) -> None:
    model = run_trial(load="leave circles")
    assert model.number("circles") == 0
    assert model.number("frozen") > 10_000  # the modules alone


def test_garbage_of_requests_in_a_process_is_collected_as_usual(run_trial: Run) -> None:
    model = run_trial()
    frozen = model.number("frozen")
    model.infer("leave circles")
    assert model.number("collect") == 0
    assert model.number("frozen") == frozen


def test_a_descriptor_too_few_leaves_no_process_behind(run_trial: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def dup(end: socket.socket) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children() if "bootstrap.py" in " ".join(child.cmdline())}

    before = children()
    monkeypatch.setattr(socket.socket, "dup", dup)
    assert "Too many open files" in run_trial().reason
    assert children() == before


def test_an_isolation_that_does_not_exist_is_refused(run_trial: Run) -> None:
    reason = run_trial(isolation="prison").reason
    assert "model 'm': parameter 'isolation' is 'prison': no plugin provides executor 'prison'; " in reason
    assert reason.endswith("installed: process, thread")


def test_an_output_that_is_not_asked_for_is_refused(run_trial: Run) -> None:
    with pytest.raises(InvalidArgument, match="unexpected inference output 'z' for model 'm'"):
        run_trial().infer(outputs=["z"])
