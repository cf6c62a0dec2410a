"""The thread of an instance outlives whatever its scheduler does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from headrace.backends.base import Device, Instance, Tensors
from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import InternalError, LoadError
from headrace.executors import instance_thread, threads
from headrace.executors.instance import ExecutionRecorder, runner_for
from headrace.executors.instance_thread import InstanceThread
from headrace.executors.output_schema import OutputSchema
from headrace.messages import dtypes
from headrace.messages.response import Answer, InferResponse
from headrace.messages.spec import Spec
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import InstanceInfo, ScheduledModel, Wait
from headrace.schedulers.dynamic import DirectScheduler
from headrace.schedulers.model_queue import ModelQueue
from headrace.telemetry.log_output import current_model, set_thread_model
from headrace.telemetry.statistics import ModelStatistics
from tests.core.conftest import make_ticket


class Echo(Instance):
    def execute(self, inputs: Tensors) -> Tensors:
        return {"x": inputs["x"]}


class Failing(DirectScheduler):
    """Raises in each call for a batch, as long as there are ``failures`` left."""

    failures = 0

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        if self.failures:
            self.failures -= 1
            raise SystemExit("stray")
        return super().next(instance, now_ns)


def thread_of(statistics: ModelStatistics) -> InstanceThread:
    schema = OutputSchema("m", "1", {"x": Spec("x", dtypes.FP32, (1,))}, False)
    echo = Echo()
    return InstanceThread("m_0", lambda: (echo, runner_for(echo, schema)), statistics.for_instance)


def scheduler_of(statistics: ModelStatistics, failures: int = 0) -> ModelQueue:
    model = ScheduledModel(ModelConfig(name="m"), [InstanceInfo("m_0", Device("cpu"))])
    model_queue = ModelQueue(Failing, model, statistics, asyncio.get_running_loop())
    assert isinstance(model_queue.scheduler, Failing)
    model_queue.scheduler.failures = failures
    return model_queue


async def ask(scheduler: ModelQueue) -> Answer:
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    ticket = make_ticket("m", {"x": np.ones(1, np.float32)}, lambda given, final: answer.set_result(given))
    scheduler.submit(ticket)
    return await asyncio.wait_for(answer, 10)


class Noting(Echo):
    """Notes the thread of each call."""

    def __init__(self) -> None:
        self.threads = [threading.current_thread()]

    def execute(self, inputs: Tensors) -> Tensors:
        self.threads.append(threading.current_thread())
        return super().execute(inputs)

    def close(self) -> None:
        self.threads.append(threading.current_thread())


def noting_thread(made: list[Noting]) -> InstanceThread:
    schema = OutputSchema("m", "1", {"x": Spec("x", dtypes.FP32, (1,))}, False)

    def load() -> tuple[Noting, Any]:
        made.append(Noting())
        return made[0], runner_for(made[0], schema)

    return InstanceThread("m_0", load, ModelStatistics().for_instance)


def test_a_loading_thread_becomes_the_thread_of_its_instance() -> None:
    async def scenario() -> None:
        made = list[Noting]()
        thread, scheduler, loop = noting_thread(made), scheduler_of(ModelStatistics()), asyncio.get_running_loop()

        def load() -> threading.Thread:
            thread.load()
            thread.serve(scheduler.sources[0], loop)
            return threading.current_thread()

        loading = await threads.run_on_thread(load, "headrace-load")
        assert loading.name == "headrace-m_0"
        assert isinstance(await ask(scheduler), InferResponse)
        scheduler.close()
        await asyncio.to_thread(thread.join)
        assert made[0].threads == [loading] * 3
        assert not loading.is_alive()

    asyncio.run(scenario())


def test_a_load_that_fails_later_closes_its_instance_on_its_own_thread() -> None:
    async def scenario() -> None:
        made = list[Noting]()
        thread = noting_thread(made)

        def load() -> None:
            thread.load()
            thread.join()
            raise LoadError(threading.current_thread().name)

        with pytest.raises(LoadError, match="headrace-m_0"):
            await threads.run_on_thread(load, "headrace-load")
        assert len({*made[0].threads}) == 1 < len(made[0].threads)
        assert not thread.alive
        await asyncio.to_thread(thread.join)

    asyncio.run(scenario())


def test_only_threads_that_may_be_reused_are_and_keep_nothing_of_their_work() -> None:
    async def scenario() -> None:
        def work() -> tuple[threading.Thread, str]:
            before, current = current_model(), threading.current_thread()
            set_thread_model("m")
            return current, before

        first = (await threads.run_on_thread(work, "a", is_reused=True))[0]
        while not threads._idle:  # it has answered, and is about to wait
            await asyncio.sleep(0)
        second, spoke_for = await threads.run_on_thread(work, "b")
        assert (second, second.name, spoke_for) == (first, "b", "")
        assert (await threads.run_on_thread(work, "c"))[0] is not first
        await asyncio.to_thread(first.join, 10)
        assert not first.is_alive()

    asyncio.run(scenario())


def test_an_idle_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_IDLE_S", 0.01)

    async def scenario() -> None:
        idle = await threads.run_on_thread(threading.current_thread, "a", is_reused=True)
        await asyncio.to_thread(idle.join, 10)
        assert not idle.is_alive()
        assert not threads._idle

    asyncio.run(scenario())


def test_an_instance_polls_a_scheduler_again_after_its_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instance_thread, "_RETRY_S", 0.01)

    async def scenario() -> None:
        statistics = ModelStatistics()
        thread, scheduler = thread_of(statistics), scheduler_of(statistics, 3)
        await asyncio.to_thread(thread.load)
        thread.serve(scheduler.sources[0], asyncio.get_running_loop())
        assert isinstance(await ask(scheduler), InferResponse)
        scheduler.close()
        await asyncio.to_thread(thread.join)

    asyncio.run(scenario())
    assert caplog.messages.count("the scheduler of instance 'm_0' raised an exception in next()") == 3


def test_an_instance_whose_scheduler_fails_for_ever_can_be_closed() -> None:
    async def scenario() -> None:
        statistics = ModelStatistics()
        thread, scheduler = thread_of(statistics), scheduler_of(statistics, 1 << 60)
        await asyncio.to_thread(thread.load)
        thread.serve(scheduler.sources[0], asyncio.get_running_loop())
        scheduler.close()
        await asyncio.wait_for(asyncio.to_thread(thread.join), 10)
        assert not thread.alive

    asyncio.run(scenario())


def test_a_batch_that_cannot_be_recorded_is_answered_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        statistics = ModelStatistics()
        thread, scheduler = thread_of(statistics), scheduler_of(statistics)
        await asyncio.to_thread(thread.load)

        def fail(*arguments: Any) -> None:
            monkeypatch.undo()
            raise SystemExit("stray")

        monkeypatch.setattr(ExecutionRecorder, "batch", fail)
        thread.serve(scheduler.sources[0], asyncio.get_running_loop())
        answers: Sequence[Answer] = [await ask(scheduler), await ask(scheduler)]
        assert isinstance(answers[0], InternalError)
        assert answers[0].message == "SystemExit: stray"
        assert isinstance(answers[1], InferResponse)
        scheduler.close()
        await asyncio.to_thread(thread.join)

    asyncio.run(scenario())
    assert "instance 'm_0' failed to deliver a batch" in caplog.text


class Together(Instance):
    """Takes three calls at once, and waits in each until it may go on."""

    concurrency = 3
    #: For the batches that may be taken.
    permits = threading.Semaphore(1000)
    shares = 0

    def __init__(self) -> None:
        self.inside = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)
        self.running = self.most = 0
        self.is_closed = False
        self._lock = threading.Lock()
        self.fails = False

    def wait_to_take(self) -> int:
        assert self.permits.acquire(timeout=10)
        assert not self.fails
        return self.shares

    def execute(self, inputs: Tensors) -> Tensors:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.inside.release()
        assert self.may_go_on.acquire(timeout=10)
        assert not self.is_closed
        with self._lock:
            self.running -= 1
        return {"x": inputs["x"]}

    def close(self) -> None:
        self.is_closed = True


class Apart(DirectScheduler):
    """To which instances are not alike."""

    name = "apart"
    instances_alike = False


class TogetherScene(NamedTuple):
    instance: Together
    thread: InstanceThread
    model_queue: ModelQueue
    statistics: ModelStatistics

    async def entered(self, count: int) -> None:
        """Return when this many more calls have begun."""
        for _ in range(count):
            assert await asyncio.to_thread(self.instance.inside.acquire, timeout=10)


@contextlib.asynccontextmanager
async def together(kind: type[DirectScheduler] = DirectScheduler) -> AsyncIterator[TogetherScene]:
    statistics, instance = ModelStatistics(), Together()
    schema = OutputSchema("m", "1", {"x": Spec("x", dtypes.FP32, (1,))}, False)
    thread = InstanceThread("m_0", lambda: (instance, runner_for(instance, schema)), statistics.for_instance)
    model = ScheduledModel(ModelConfig(name="m"), [InstanceInfo("m_0", Device("cpu"))])
    model_queue = ModelQueue(kind, model, statistics, asyncio.get_running_loop())
    await asyncio.to_thread(thread.load)
    thread.serve(model_queue.sources[0], asyncio.get_running_loop())
    try:
        yield TogetherScene(instance, thread, model_queue, statistics)
    finally:
        instance.may_go_on.release(100)
        model_queue.close()
        await asyncio.wait_for(asyncio.to_thread(thread.join), 10)
    assert instance.is_closed
    assert not [each.name for each in threading.enumerate() if each.name.startswith("headrace-m_0")]


def test_a_batch_is_taken_when_the_instance_is_free(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Together, "permits", threading.Semaphore(1))

    async def scenario() -> None:
        async with together() as scene:
            answers = [asyncio.ensure_future(ask(scene.model_queue)) for _ in range(3)]
            await scene.entered(1)
            assert not await asyncio.to_thread(scene.instance.inside.acquire, timeout=0.05)
            assert scene.model_queue.pending == 2
            assert scene.model_queue.at_once == 3
            scene.instance.shares = 2
            scene.instance.permits.release()
            await scene.entered(1)
            assert scene.model_queue.at_once == 2
            scene.instance.fails = True
            scene.instance.permits.release()
            await scene.entered(1)  # an instance that fails to wait is served all the same
            scene.instance.permits.release(100)
            scene.instance.may_go_on.release(3)
            assert all(isinstance(each, InferResponse) for each in await asyncio.gather(*answers))

    asyncio.run(scenario())
    assert "instance 'm_0' raised an exception in wait_to_take()" in caplog.text


def test_an_instance_may_take_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other threads sleep meanwhile."""
    monkeypatch.setattr(Together, "shares", 1)

    async def scenario() -> None:
        async with together() as scene:
            answers = [asyncio.ensure_future(ask(scene.model_queue)) for _ in range(8)]
            await scene.entered(1)
            scene.instance.may_go_on.release()
            await scene.entered(1)
            assert not await asyncio.to_thread(scene.instance.inside.acquire, timeout=0.05)
            assert len(scene.thread.executing) == 1
            scene.instance.shares = 3
            scene.instance.may_go_on.release()
            await scene.entered(3)
            scene.instance.shares = 1
            scene.instance.may_go_on.release(100)
            answers += [asyncio.ensure_future(ask(scene.model_queue)) for _ in range(8)]
            assert all(isinstance(each, InferResponse) for each in await asyncio.gather(*answers))
            # All threads end, sleeping ones included.

    asyncio.run(scenario())


def test_an_instance_is_called_as_often_at_once_as_it_takes_and_no_more() -> None:
    async def scenario() -> None:
        async with together() as scene:
            answers = [asyncio.ensure_future(ask(scene.model_queue)) for _ in range(5)]
            await scene.entered(3)
            assert len(scene.thread.executing) == 3
            assert scene.model_queue.pending == 2
            scene.instance.may_go_on.release(5)
            assert all(isinstance(each, InferResponse) for each in await asyncio.gather(*answers))
            assert scene.instance.most == 3
            executions = scene.statistics.snapshot().executions
            assert (executions.execution_count, executions.success.count) == (5, 5)
            assert scene.model_queue.at_once == 3
            assert scene.model_queue.last_ns > 0
            assert not scene.thread.executing

    asyncio.run(scenario())


def test_instances_that_differ_get_calls_one_at_a_time() -> None:
    async def scenario() -> None:
        async with together(Apart) as scene:
            answers = [asyncio.ensure_future(ask(scene.model_queue)) for _ in range(4)]
            await scene.entered(1)
            await asyncio.sleep(0.05)  # a second call would have begun by now
            scene.instance.may_go_on.release(4)
            assert all(isinstance(each, InferResponse) for each in await asyncio.gather(*answers))
            assert scene.instance.most == 1

    asyncio.run(scenario())


def test_an_instance_closes_when_the_last_of_its_calls_has_returned() -> None:
    async def scenario() -> None:
        async with together() as scene:
            answers = [asyncio.ensure_future(ask(scene.model_queue)) for _ in range(2)]
            await scene.entered(2)
            scene.model_queue.close()
            joined = asyncio.ensure_future(asyncio.to_thread(scene.thread.join))
            await asyncio.sleep(0.05)
            assert not joined.done()
            assert not scene.instance.is_closed
            scene.instance.may_go_on.release(2)
            assert all(isinstance(each, InferResponse) for each in await asyncio.gather(*answers))
            await asyncio.wait_for(joined, 10)

    asyncio.run(scenario())


def test_an_instance_that_stops_runs_all_batches_that_it_has() -> None:
    async def scenario() -> None:
        async with together() as scene:
            answers = [asyncio.ensure_future(ask(scene.model_queue)) for _ in range(2)]
            await scene.entered(2)
            source = scene.model_queue.sources[0]
            scene.model_queue.replace_instances([], [source])
            dismissed = asyncio.ensure_future(scene.model_queue.dismiss(source))
            scene.instance.may_go_on.release(2)
            assert all(isinstance(each, InferResponse) for each in await asyncio.gather(*answers))
            await asyncio.wait_for(dismissed, 10)
            source.end()
            await asyncio.wait_for(asyncio.to_thread(scene.thread.join), 10)

    asyncio.run(scenario())
