"""Sequences with instances on the event loop: the same batches, states and answers as on threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pytest

from headrace import (
    Backend,
    HeadraceError,
    InferRequest,
    InferResponse,
    Instance,
    Model,
    RequestInstance,
    Rescheduled,
    Server,
    Tensors,
    Ticket,
)
from headrace.messages.response import Answer
from headrace.registry import PluginInfo

from .conftest import CONTROLS

HANGING_S = 90
BOTH_WAYS = pytest.mark.parametrize("event_loop", ["on", "off"])
#: One row of a batch: the id, the input, READY, START, END.
Row: TypeAlias = tuple[int, float, int, int, int]


class Told(Instance):
    """Returns the sum of the inputs of its sequence, which is an implicit state. Records its batches and threads."""

    any_thread = True

    def execute(self, inputs: Tensors) -> Tensors:
        columns = [np.asarray(inputs[name]).ravel().tolist() for name in ("ID", "x", "READY", "START", "END")]
        Noting.ran([(int(key), x, *map(int, flags)) for key, x, *flags in zip(*columns, strict=True)])
        total = np.asarray(inputs["x"]) + np.asarray(inputs["before"])
        return {"y": total, "after": total}

    def close(self) -> None:
        Noting.closed += 1


class CountsDown(RequestInstance):
    """Reschedules a request as often as its input."""

    any_thread = True

    def __init__(self) -> None:
        self.left: dict[int | str, int] = {}

    def execute_requests(self, requests: Sequence[InferRequest]) -> list[InferResponse | HeadraceError]:
        ran = [each for each in requests if each.sequence_id]  # padding
        Noting.ran([(int(each.sequence_id), 0.0, 1, each.sequence_start, 0) for each in ran])
        return [self.step(request) for request in requests]

    def step(self, request: InferRequest) -> InferResponse | HeadraceError:
        x = np.asarray(request.inputs["x"])
        left = self.left.get(request.sequence_id, int(x.item())) - 1
        self.left[request.sequence_id] = left
        return Rescheduled() if left > 0 else InferResponse({"y": x})


class Noting(Backend):
    name: ClassVar[str] = "noting"
    batches: ClassVar[list[list[Row]]]
    threads: ClassVar[set[str]]
    closed: ClassVar[int]

    @classmethod
    def ran(cls, rows: list[Row]) -> None:
        cls.batches.append(rows)
        cls.threads.add(threading.current_thread().name)

    def load(self, model: Model) -> Instance | RequestInstance:
        return CountsDown() if model.name == "counts_down" else Told()


STATE = 'state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: 1 }'


def config(strategy: str, event_loop: str, count: int = 1, more: str = CONTROLS + STATE) -> str:
    return f"""
backend: "noting" max_batch_size: 2 instance_group {{ kind: KIND_CPU count: {count} }}
input {{ name: "x" data_type: TYPE_FP32 dims: 1 }} output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}
sequence_batching {{ max_sequence_idle_microseconds: 600000000 {strategy} {more} }}
parameters {{ key: "event_loop" value {{ string_value: "{event_loop}" }} }}
"""


Scenario: TypeAlias = Callable[[Server], Coroutine[Any, Any, None]]
Play: TypeAlias = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], None]:
    def write(name: str, text: str) -> None:
        (tmp_path / name / "1").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "config.pbtxt").write_text(text)

    return write


@pytest.fixture
def run_scenario(tmp_path: Path, write: Callable[[str, str], None]) -> Play:
    """Plays a scenario to a server with one model; returns the threads that have executed."""
    Noting.batches, Noting.threads, Noting.closed = [], set(), 0

    def run_scenario(scenario: Scenario, text: str, name: str = "m") -> None:
        write(name, text)

        async def whole() -> None:
            server = Server(tmp_path, model_control_mode="explicit", load_model=(name,))
            server.plugins.backends.add(Noting, PluginInfo("noting", "tests", "0"))
            async with server:
                await scenario(server)

        asyncio.run(asyncio.wait_for(whole(), HANGING_S))
        is_on_loop = 'string_value: "on"' in text
        assert Noting.threads <= {threading.current_thread().name} or not is_on_loop
        assert is_on_loop or threading.current_thread().name not in Noting.threads

    return run_scenario


def send(server: Server, key: int, x: float, flags: str = "", name: str = "m") -> tuple[Ticket, asyncio.Future[Answer]]:
    """A request of sequence ``key``, in this very turn of the loop, and its answer to be."""
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    inputs = {"x": np.array([[x]], np.float32)}
    request = InferRequest(name, inputs, sequence_id=key, sequence_start="S" in flags, sequence_end="E" in flags)
    ticket = Ticket(request, lambda response, final: answer.set_result(response))
    server.submit(ticket)
    return ticket, answer


async def ask(server: Server, key: int, x: float, flags: str = "") -> float:
    return value_of(await send(server, key, x, flags)[1])


def value_of(answer: Answer) -> float:
    assert isinstance(answer, InferResponse), answer
    return float(np.asarray(answer.outputs["y"]).item())


@BOTH_WAYS
@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_slots_controls_and_states_are_those_of_threads(run_scenario: Play, strategy: str, event_loop: str) -> None:
    async def scenario(server: Server) -> None:
        steps = [(1, "S"), (2, "S"), (1, ""), (2, ""), (3, "S"), (1, "E"), (2, "E"), (3, "E")]
        answers = [send(server, key, place + key / 10, flags)[1] for place, (key, flags) in enumerate(steps)]
        values = [value_of(answer) for answer in await asyncio.gather(*answers)]
        sums = {1: 0.0, 2: 0.0, 3: 0.0}
        expected = []
        for place, (key, _) in enumerate(steps):
            sums[key] += place + key / 10
            expected.append(sums[key])
        np.testing.assert_allclose(values, expected, rtol=1e-6)
        assert (server.served("m")[0].model_queue.in_flight, server.served("m")[0].snapshot().success.count) == (0, 8)

    run_scenario(scenario, config(strategy, event_loop))
    shown = [[(key, ready, start, end) for key, _, ready, start, end in rows] for rows in Noting.batches]
    assert shown == [
        [(1, 1, 1, 0), (2, 1, 1, 0)],
        [(1, 1, 0, 0), (2, 1, 0, 0)],
        [(1, 1, 0, 1), (2, 1, 0, 1)],
        [(3, 1, 1, 0)],
        [(3, 1, 0, 1)],
    ]


@BOTH_WAYS
@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_an_iterating_request_runs_to_its_end_beside_new_ones(
    run_scenario: Play, strategy: str, event_loop: str
) -> None:
    async def scenario(server: Server) -> None:
        answers = [send(server, 0, runs, name="counts_down")[1] for runs in (4, 2, 3)]
        responses = await asyncio.gather(*answers)
        assert [value_of(answer) for answer in responses] == [4, 2, 3]
        assert server.served("counts_down")[0].snapshot().success.count == 9

    run_scenario(scenario, config(strategy, event_loop, more="iterative_sequence: true"), "counts_down")
    first, second, third = dict.fromkeys(key for batch in Noting.batches for key, *_ in batch)
    ran = [sorted(key for key, *_ in batch) for batch in Noting.batches]
    assert ran == [sorted(each) for each in ([first, second], [first, second], [first, third], [first, third], [third])]
    assert [key for batch in Noting.batches for key, _, _, start, _ in batch if start] == [first, second, third]


@BOTH_WAYS
def test_a_cancelled_sequence_frees_its_slot_for_the_next(run_scenario: Play, event_loop: str) -> None:
    async def scenario(server: Server) -> None:
        assert [await ask(server, key, key, "S") for key in (1, 2)] == [1, 2]
        waiting = [send(server, 3, 3, "S"), send(server, 3, 3)]
        leaving, answer = send(server, 1, 1)
        leaving.cancel()
        await answer
        responses = [await answer for _, answer in waiting]
        assert [value_of(each) for each in responses] == [3, 6]
        assert await ask(server, 2, 2) == 4
        with pytest.raises(HeadraceError, match="must specify the START flag"):
            send(server, 1, 1)

    run_scenario(scenario, config("direct { }", event_loop))


@BOTH_WAYS
def test_sequences_keep_their_instance_while_others_are_replaced(
    run_scenario: Play, write: Callable[[str, str], None], event_loop: str
) -> None:
    async def scenario(server: Server) -> None:
        sums = [await ask(server, key, key, "S") for key in (1, 2)]
        for count in (3, 2, 3):
            write("m", config("direct { }", event_loop, count))
            answers = [send(server, key, key)[1] for key in (1, 2)]
            await server.load("m")
            sums = [total + key for total, key in zip(sums, (1, 2), strict=True)]
            responses = await asyncio.gather(*answers)
            assert [value_of(each) for each in responses] == sums
            where = server.explain("m")["runs_on"]
            assert len([name for name, place in where.items() if place == WHERE[event_loop]]) == count
            assert server.served("m")[0].snapshot().on_loop == (count if event_loop == "on" else 0)
        assert [await ask(server, key, 0, "E") for key in (1, 2)] == sums

    run_scenario(scenario, config("direct { }", event_loop))
    assert Noting.closed == 4  # 1 + 2 + 1 instances were created, none twice


WHERE = {"on": "event_loop", "off": "thread"}


@BOTH_WAYS
def test_an_unload_waits_for_running_requests_and_a_load_starts_without(run_scenario: Play, event_loop: str) -> None:
    async def scenario(server: Server) -> None:
        assert await ask(server, 1, 5, "S") == 5
        answers = [send(server, 1, 1)[1] for _ in range(3)] + [send(server, 2, 1, "SE")[1]]
        await server.unload("m")
        responses = await asyncio.gather(*answers)
        assert [value_of(each) for each in responses] == [6, 7, 8, 1]
        await server.load("m")
        with pytest.raises(HeadraceError, match="must specify the START flag"):
            send(server, 1, 1)
        assert await ask(server, 1, 2, "S") == 2
        last.append(send(server, 1, 1)[1])  # is answered while the server stops

    last: list[asyncio.Future[Answer]] = []
    run_scenario(scenario, config("oldest { }", event_loop))
    assert value_of(last[0].result()) == 3
