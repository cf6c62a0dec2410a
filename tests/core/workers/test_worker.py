"""The thread of an instance outlives whatever its scheduler does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.backends.base import Device, Instance, Tensors
from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import InternalError
from headrace.messages import dtypes
from headrace.messages.response import Answer, InferResponse
from headrace.messages.spec import Spec
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import InstanceInfo, ScheduledModel, Wait
from headrace.schedulers.dynamic import DirectScheduler
from headrace.schedulers.kernel import Kernel
from headrace.telemetry.statistics import ModelStatistics
from headrace.workers import worker
from headrace.workers.instance import runner_for
from headrace.workers.output_schema import OutputSchema
from headrace.workers.worker import InstanceThread
from tests.core.conftest import make_ticket


class Echo(Instance):
    def execute(self, inputs: Tensors) -> Tensors:
        return {"x": inputs["x"]}


class Failing(DirectScheduler):
    """Raises whenever a batch is asked for, as long as there are ``failures`` left."""

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


def scheduler_of(statistics: ModelStatistics, failures: int = 0) -> Kernel:
    model = ScheduledModel(ModelConfig(name="m"), [InstanceInfo("m_0", Device("cpu"))])
    kernel = Kernel(Failing, model, statistics, asyncio.get_running_loop())
    assert isinstance(kernel.scheduler, Failing)
    kernel.scheduler.failures = failures
    return kernel


async def ask(scheduler: Kernel) -> Answer:
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    ticket = make_ticket("m", {"x": np.ones(1, np.float32)}, lambda given, final: answer.set_result(given))
    scheduler.submit(ticket)
    return await asyncio.wait_for(answer, 10)


def test_an_instance_asks_a_scheduler_that_has_failed_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "_RETRY_S", 0.01)

    async def scenario() -> None:
        statistics = ModelStatistics()
        thread, scheduler = thread_of(statistics), scheduler_of(statistics, 3)
        await asyncio.to_thread(thread.load)
        thread.serve(scheduler.sources[0], asyncio.get_running_loop())
        assert isinstance(await ask(scheduler), InferResponse)
        scheduler.close()
        await asyncio.to_thread(thread.join)

    asyncio.run(scenario())
    assert caplog.messages.count("the scheduler of instance 'm_0' failed to give it a batch") == 3


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

        monkeypatch.setattr(type(thread._recorder), "batch", fail)
        thread.serve(scheduler.sources[0], asyncio.get_running_loop())
        answers: Sequence[Answer] = [await ask(scheduler), await ask(scheduler)]
        assert isinstance(answers[0], InternalError)
        assert answers[0].message == "SystemExit: stray"
        assert isinstance(answers[1], InferResponse)
        scheduler.close()
        await asyncio.to_thread(thread.join)

    asyncio.run(scenario())
    assert "instance 'm_0' could not see a batch through" in caplog.text
