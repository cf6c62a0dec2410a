"""An instance and a scheduler run without a server, as a server runs them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from google.protobuf import text_format

from headrace import (
    Answer,
    ConfigError,
    Device,
    InferRequest,
    InferResponse,
    Instance,
    InstanceHarness,
    InstanceInfo,
    InvalidArgument,
    ModelConfig,
    Scheduler,
    SchedulerHarness,
    Spec,
    Tensors,
    Ticket,
    Wait,
    dtypes,
)
from headrace_testing.simulated_parts import ManualClock

CONFIG = """name: "m" max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }"""
X, Y = Spec("x", dtypes.FP32, (1,)), Spec("y", dtypes.FP32, (1,))


class Doubles(Instance):
    def execute(self, inputs: Tensors) -> Tensors:
        return {"y": 2 * np.asarray(inputs["x"])}


class Bare(Instance):
    def execute(self, inputs: Tensors) -> Tensors:
        return np.asarray(inputs["x"])  # type: ignore[return-value]


@dataclass(frozen=True)
class Patience:
    delay_us: int = 0


class TwoByTwo(Scheduler):
    """Runs two requests at a time, and no single one."""

    name = "two_by_two"

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return self.context.waiting.head(2) if len(self.context.waiting) > 1 else ()


def ticket_for(x: object, answers: list[Answer]) -> Ticket:
    return Ticket(InferRequest("m", {"x": np.array(x, np.float32)}), lambda answer, final: answers.append(answer))


def parsed(text: str = "") -> ModelConfig:
    return text_format.Parse(CONFIG + text, ModelConfig())


def values(answers: Sequence[Answer]) -> list[float]:
    assert all(isinstance(answer, InferResponse) for answer in answers)
    return [float(np.asarray(answer.outputs["y"])[0, 0]) for answer in answers if isinstance(answer, InferResponse)]


def test_an_instance_answers_a_batch_on_the_calling_thread() -> None:
    harness, unheard = InstanceHarness(Doubles(), parsed()), list[Answer]()
    tickets = [ticket_for([[number]], unheard) for number in (1, 2)]
    for ticket in tickets:
        harness.check(ticket)
    assert values(harness.run(tickets)) == [2, 4]


def test_a_request_that_does_not_fit_the_config_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="unexpected shape for input 'x'"):
        InstanceHarness(Doubles(), parsed()).check(ticket_for([[1, 2]], []))


def scheduled(kind: type[Scheduler], config: ModelConfig) -> SchedulerHarness:
    info = InstanceInfo("m_0_0", Device("cpu"), 4)
    return SchedulerHarness(kind, config, [info], {"x": X}, {"y": Y}, ManualClock(), other_model, {})


def other_model(ticket: Ticket) -> None:
    raise AssertionError("it asks another model")


def test_threads_run_the_requests_that_the_scheduler_chooses() -> None:
    answers: list[Answer] = []

    async def run() -> None:
        harness = scheduled(TwoByTwo, parsed())
        await harness.start_threads(Doubles)
        for number in (1, 2, 3, 4):
            harness.model_queue.submit(ticket_for([[number]], answers))
        await harness.model_queue.drain()
        harness.model_queue.close()
        await harness.join_threads()
        assert "headrace-m_0_0" not in [thread.name for thread in threading.enumerate()]
        executions = harness.statistics.snapshot().executions
        assert (executions.execution_count, executions.inference_count) == (2, 4)

    asyncio.run(asyncio.wait_for(run(), 90))
    assert sorted(values(answers)) == [2, 4, 6, 8]


def test_a_parameter_that_the_scheduler_does_not_know_is_refused() -> None:
    class Patient(TwoByTwo):
        Parameters = Patience

    config = parsed('parameters { key: "scheduler.no_such" value { string_value: "1" } }')

    async def run() -> None:
        scheduled(Patient, config)

    with pytest.raises(ConfigError, match=r"unknown parameter 'no_such'.*known: delay_us"):
        asyncio.run(run())


def test_an_instance_that_returns_no_dict_is_named_with_the_rule() -> None:
    tickets = [ticket_for([[1]], []), ticket_for([[2]], [])]
    harness = InstanceHarness(Bare(), parsed())
    for ticket in tickets:
        harness.check(ticket)
    rule = "model 'm': execute() returned ndarray, expected a dict of arrays by the name of the output"
    assert [str(answer) for answer in harness.run(tickets)] == [rule, rule]
