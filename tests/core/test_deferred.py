"""A `DeferredInstance` in a thread of a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.backends.base import Backend, Call, DeferredInstance, Model
from headrace.errors import InternalError, Unavailable
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import UNREAD, Ticket
from headrace.registry import PluginInfo
from headrace.server import Server

CONFIG = """
backend: "held" max_batch_size: 8 dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 20000000 }
input { name: "n" data_type: TYPE_INT32 dims: [1] } output { name: "y" data_type: TYPE_INT32 dims: [1] }
"""
ALONE = CONFIG.replace(
    'max_batch_size: 8 dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 20000000 }', ""
)  # fmt: skip


class Holding(DeferredInstance):
    """Keeps every call; sends as many responses as input ``n`` when the test calls it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.arrived = threading.Semaphore(0)
        self.closed = False

    def accept(self, calls: Sequence[Call]) -> None:
        self.calls.extend(calls)
        for _ in calls:
            self.arrived.release()

    def answer(self, call: Call, responses: int) -> None:
        for _ in range(responses):
            call.send(InferResponse({"y": call.request.inputs["n"]}), final=False)  # type: ignore[dict-item]
        call.send(None)

    def close(self) -> None:
        self.closed = True


class HoldingBackend(Backend):
    name: ClassVar[str] = "held"
    instance: ClassVar[Holding]

    def load(self, model: Model) -> Holding:
        return self.instance


@pytest.fixture
def holding() -> Iterator[Holding]:
    HoldingBackend.instance = Holding()
    yield HoldingBackend.instance
    HoldingBackend.instance.calls.clear()


@pytest.fixture
def server(write_model: Any, make_server: Callable[..., Server], holding: Holding) -> Server:
    write_model("m", CONFIG)
    write_model("alone", ALONE)
    server = make_server(exit_timeout_secs=5)
    server.plugins.backends.add(HoldingBackend, PluginInfo("held", "tests", "0"))
    return server


def ask(server: Server, model: str, number: int) -> asyncio.Task[InferResponse]:
    n = np.array([[number]] if model == "m" else [number], np.int32)
    return asyncio.ensure_future(server.infer_async(model, {"n": n}))


async def arrived(holding: Holding, count: int) -> None:
    for _ in range(count):
        assert await asyncio.to_thread(holding.arrived.acquire, timeout=10)


def test_answers_in_any_order_find_their_callers_and_are_one_execution(server: Server, holding: Holding) -> None:
    async def scenario() -> None:
        async with server:
            view = server.engine.resolve("m")
            assert view.capacity() == 8
            tasks = [ask(server, "m", number) for number in range(4)]
            await arrived(holding, 4)
            while view.capacity():  # it can take more, so that its batches say nothing
                await asyncio.sleep(0)
            for call in reversed(holding.calls):
                await asyncio.to_thread(holding.answer, call, 1)
            answers = [await task for task in tasks]
            assert [int(np.asarray(answer.outputs["y"])[0, 0]) for answer in answers] == [0, 1, 2, 3]
            (model,) = server.served("m")
            executions = model.snapshot().executions
            assert (executions.inference_count, executions.execution_count, executions.success.count) == (4, 1, 4)
            assert list(executions.batches) == [4]
            assert executions.compute_infer.count == 4

    asyncio.run(scenario())


def test_a_late_error_is_counted_as_a_failure(server: Server, holding: Holding) -> None:
    async def scenario() -> None:
        async with server:
            task = ask(server, "alone", 1)
            await arrived(holding, 1)
            holding.calls.pop().send(Unavailable("not now"))
            with pytest.raises(Unavailable, match="not now"):
                await task
            (model,) = server.served("alone")
            executions = model.snapshot().executions
            assert (executions.success.count, executions.fail.count) == (0, 1)

    asyncio.run(scenario())


def test_too_many_responses_of_a_model_that_is_not_decoupled_are_an_error_and_do_not_stop_it(
    server: Server, holding: Holding
) -> None:
    async def scenario() -> None:
        async with server:
            task = ask(server, "alone", 1)
            await arrived(holding, 1)
            await asyncio.wait_for(asyncio.to_thread(holding.answer, holding.calls.pop(), 5 * UNREAD), 10)
            with pytest.raises(InternalError, match=f"expected a single response, got {5 * UNREAD}"):
                await task

    asyncio.run(scenario())


def test_a_call_that_the_model_loses_is_answered(server: Server, holding: Holding) -> None:
    async def scenario() -> None:
        async with server:
            task = ask(server, "alone", 1)
            await arrived(holding, 1)
            holding.calls.clear()
            with pytest.raises(Exception, match="model 'alone': the backend gave no last answer"):
                await task

    asyncio.run(scenario())


def test_stopping_waits_for_open_calls(server: Server, holding: Holding) -> None:
    async def scenario() -> None:
        await server.start()
        task = ask(server, "alone", 7)
        await arrived(holding, 1)
        stopping = asyncio.ensure_future(server.stop())
        await asyncio.wait((stopping,), timeout=0.1)
        assert not stopping.done()
        await asyncio.to_thread(holding.answer, holding.calls.pop(), 1)
        await stopping
        assert int(np.asarray((await task).outputs["y"])[0]) == 7
        assert holding.closed

    asyncio.run(scenario())


def test_calls_open_at_the_end_of_the_exit_timeout_are_ended(
    write_model: Any, make_server: Callable[..., Server], holding: Holding
) -> None:
    write_model("alone", ALONE)
    server = make_server(exit_timeout_secs=0)
    server.plugins.backends.add(HoldingBackend, PluginInfo("held", "tests", "0"))

    async def scenario() -> None:
        await server.start()
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        request = InferRequest("alone", {"n": np.array([1], np.int32)})
        server.submit(Ticket(request, lambda answer, final: answered.set_result(answer)))
        await arrived(holding, 1)
        with pytest.raises(Unavailable, match="Exit timeout expired"):
            await server.stop()
        answer = await asyncio.wait_for(answered, 10)
        assert isinstance(answer, Unavailable)
        assert answer.message == "[request id: <id_unknown>] Server is stopping"

    asyncio.run(scenario())


def test_a_warm_up_waits_for_late_answers(
    write_model: Any, make_server: Callable[..., Server], holding: Holding
) -> None:
    zeros = 'inputs { key: "n" value { data_type: TYPE_INT32 dims: [1] zero_data: true } }'
    sample = f'model_warmup {{ name: "s" batch_size: 1 count: 2 {zeros} }}'
    write_model("alone", ALONE + sample)
    server = make_server()
    server.plugins.backends.add(HoldingBackend, PluginInfo("held", "tests", "0"))
    answered = 0

    def answer_two() -> None:
        nonlocal answered
        for _ in range(2):
            assert holding.arrived.acquire(timeout=10)
            holding.answer(holding.calls.pop(), 1)
            answered += 1

    thread = threading.Thread(target=answer_two, daemon=True)
    thread.start()

    async def scenario() -> None:
        async with server:
            assert answered == 2

    asyncio.run(scenario())
    thread.join(10)
