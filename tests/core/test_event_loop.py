"""Instances that the event loop runs: on the right threads, and without harm to others when they fail, block or
close."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace import InferResponse, Server
from headrace.backends.base import Backend, Instance, Model, RequestInstance, Tensors
from headrace.errors import BackendError, HeadraceError, Unavailable
from headrace.executors import loop_policy
from headrace.messages.request import InferRequest
from headrace.registry import PluginInfo

HANGING_S = 90
ON = 'parameters { key: "event_loop" value { string_value: "on" } }'
AUTO = ON.replace('"on"', '"auto"')
TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'
X = {"x": np.ones((1, 1), np.float32)}


class Worried(Instance):
    """Notes on which thread it does what, and obeys its rows."""

    any_thread = True

    def __init__(self, model: Model) -> None:
        self.services, self.alone = model.services, Exclusive()
        self.note("load")

    def note(self, what: str) -> None:
        Worries.seen.append((what, threading.current_thread().name))

    def warm_up(self) -> None:
        self.note("warm_up")

    def execute(self, inputs: Tensors) -> Tensors:
        x = np.asarray(inputs["x"])
        with self.alone:
            self.note(f"execute {len(x)}")
            for value in x[:, 0]:
                self.obey(float(value))
        return {"y": x * 2}

    def obey(self, value: float) -> None:
        if value == -1:
            raise ValueError("minus one")
        if value == -2:
            raise SystemExit("minus two")
        if value == -3:
            Worries.entered.set()
            while not Worries.go_on.is_set():  # on the loop, where tests of ours may not wait
                continue
        if value == -4:
            assert self.services is not None
            answer = self.services.ask(InferRequest("other", X))
            raise answer if isinstance(answer, HeadraceError) else BackendError("answered")
        if value == -5:
            assert self.services is not None
            self.services.unload_model("other", False)

    def close(self) -> None:
        self.note("close")


class OneByOne(RequestInstance):
    any_thread = True

    def execute_requests(self, requests: list[InferRequest]) -> list[InferResponse]:  # type: ignore[override]
        Worries.seen.append((f"execute {len(requests)}", threading.current_thread().name))
        return [InferResponse({"y": np.asarray(request.inputs["x"]) * 3}) for request in requests]


class Bound(Instance):
    def execute(self, inputs: Tensors) -> Tensors:
        return {"y": inputs["x"]}


class Exclusive:
    """A lock that fails instead of waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        assert self._lock.acquire(blocking=False), "two executions at a time"

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Worries(Backend):
    name: ClassVar[str] = "worries"
    seen: ClassVar[list[tuple[str, str]]]
    entered: ClassVar[threading.Event]
    go_on: ClassVar[threading.Event]

    def load(self, model: Model) -> Instance | RequestInstance:
        if model.name.startswith("one_by_one"):
            return OneByOne()
        return Bound() if model.name == "bound" else Worried(model)


def config(name: str, text: str = "") -> str:
    chosen = "" if "event_loop" in text else ON
    return f'name: "{name}" backend: "worries" max_batch_size: 8 {TENSORS} {chosen} {text}'


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], None]:
    def write(name: str, text: str) -> None:
        (tmp_path / name / "1").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "config.pbtxt").write_text(text)

    return write


Scenario = Callable[[Server], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path, write: Callable[[str, str], None]) -> Callable[..., None]:
    """Plays a scenario to a server with the model ``m`` of the config text given, and an identity ``other``."""
    Worries.seen = []
    Worries.entered, Worries.go_on = threading.Event(), threading.Event()

    def play(scenario: Scenario, text: str = "", name: str = "m", **options: Any) -> None:
        write(name, config(name, text))
        write("other", f'backend: "identity" max_batch_size: 8 {TENSORS}')

        async def whole() -> None:
            server = Server(tmp_path, model_control_mode="explicit", load_model=(name, "other"), **options)
            server.plugins.backends.add(Worries, PluginInfo("worries", "tests", "0"))
            await server.start()
            try:
                await scenario(server)
            finally:
                await server.stop()

        asyncio.run(asyncio.wait_for(whole(), HANGING_S))

    return play


async def ask(server: Server, value: float = 1, name: str = "m") -> float:
    response = await server.infer_async(name, {"x": np.full((1, 1), value, np.float32)})
    return float(np.asarray(response.outputs["y"])[0, 0])


def executions() -> list[str]:
    return [what for what, _ in Worries.seen if what.startswith("execute")]


def test_the_loop_executes_and_the_instances_thread_does_the_rest(play: Callable[..., None]) -> None:
    async def scenario(server: Server) -> None:
        assert [await ask(server, value) for value in (1, 2, 3)] == [2, 4, 6]
        assert server.explain("m")["runs_on"] == {"m_0": "event_loop"}
        assert server.explain("other")["runs_on"] == {"other_0": "thread"}
        assert [server.served(name)[0].snapshot().on_loop for name in ("m", "other")] == [1, 0]

    play(scenario)
    here = threading.current_thread().name
    assert {name for what, name in Worries.seen if what.startswith("execute")} == {here}
    assert {name for what, name in Worries.seen if not what.startswith("execute")} == {"headrace-m_0"}
    assert [what for what, _ in Worries.seen] == ["load", "warm_up", "execute 1", "execute 1", "execute 1", "close"]


def test_the_second_rung_runs_on_the_loop_too(play: Callable[..., None]) -> None:
    async def scenario(server: Server) -> None:
        assert await ask(server, 2, "one_by_one") == 6

    play(scenario, name="one_by_one")
    assert Worries.seen == [("execute 1", threading.current_thread().name)]


def test_requests_of_one_turn_of_the_loop_are_one_batch(play: Callable[..., None]) -> None:
    async def scenario(server: Server) -> None:
        assert await asyncio.gather(*(ask(server, value) for value in range(6))) == [0, 2, 4, 6, 8, 10]
        assert executions() == ["execute 6"]
        snapshot = server.served("m")[0].snapshot()
        assert (snapshot.success.count, snapshot.executions.execution_count) == (6, 1)

    play(scenario, "dynamic_batching {}")


def test_a_batch_waits_for_its_delay_or_its_rows(play: Callable[..., None]) -> None:
    async def scenario(server: Server) -> None:
        inferences = [asyncio.ensure_future(ask(server, value)) for value in range(3)]
        while server.served("m")[0].model_queue.pending < 3:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert executions() == []
        inferences.append(asyncio.ensure_future(ask(server, 3)))
        assert await asyncio.gather(*inferences) == [0, 2, 4, 6]
        assert executions() == ["execute 4"]

    play(scenario, "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 60000000 }")


def test_without_batching_requests_run_one_after_the_other_on_several_instances(play: Callable[..., None]) -> None:
    async def scenario(server: Server) -> None:
        values = [float(number) for number in range(200)]
        assert await asyncio.gather(*(ask(server, each) for each in values)) == [2 * each for each in values]
        assert executions() == ["execute 1"] * 200

    play(scenario, "instance_group { count: 3 kind: KIND_CPU }")


@pytest.mark.parametrize(("value", "text"), [(-1, "ValueError: minus one"), (-2, "SystemExit: minus two")])
def test_a_raise_is_the_error_of_its_request_and_of_no_other(
    play: Callable[..., None], value: float, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: Server) -> None:
        first, second = await asyncio.gather(ask(server, value), ask(server, 1), return_exceptions=True)
        assert isinstance(first, BackendError)
        assert text in first.message
        assert second == 2
        assert await ask(server, 3) == 6

    play(scenario, "dynamic_batching {}")


def test_a_block_delays_what_comes_meanwhile_and_loses_nothing(play: Callable[..., None]) -> None:
    async def scenario(server: Server) -> None:
        loop = asyncio.get_running_loop()
        others: list[concurrent.futures.Future[float]] = []

        def come_meanwhile() -> None:
            assert Worries.entered.wait(HANGING_S)
            others.append(asyncio.run_coroutine_threadsafe(ask(server, 5, "other"), loop))
            others.append(asyncio.run_coroutine_threadsafe(ask(server, 6), loop))
            Worries.go_on.set()

        thread = threading.Thread(target=come_meanwhile)
        thread.start()
        assert await ask(server, -3) == -6
        await asyncio.to_thread(thread.join)
        assert [await asyncio.wrap_future(other) for other in others] == [5, 12]

    play(scenario)


@pytest.mark.parametrize("value", [-4, -5])
def test_call_on_the_loop_that_would_wait_for_another_model_is_refused(play: Callable[..., None], value: float) -> None:
    async def scenario(server: Server) -> None:
        with pytest.raises(HeadraceError, match="would block the event loop"):
            await ask(server, value)
        assert await ask(server, 1, "other") == 1

    play(scenario)


def test_reloads_lose_nothing_and_close_on_the_instances_thread(
    play: Callable[..., None], write: Callable[[str, str], None]
) -> None:
    async def scenario(server: Server) -> None:
        done = 0

        async def keep_asking() -> None:
            nonlocal done
            while not over.is_set():
                assert await ask(server, 1) == 2
                done += 1

        over = asyncio.Event()
        askers = [asyncio.ensure_future(keep_asking()) for _ in range(4)]
        for number in range(5):
            text = "dynamic_batching {}" if number % 2 else "dynamic_batching { max_queue_delay_microseconds: 1 }"
            write("m", config("m", text))
            await server.load("m")
        over.set()
        await asyncio.gather(*askers)
        assert done >= 4
        await server.unload("m")
        with pytest.raises(HeadraceError):
            await ask(server)

    play(scenario, "dynamic_batching {}")
    closes = [name for what, name in Worries.seen if what == "close"]
    assert closes == ["headrace-m_0"] * 6


def test_instances_come_and_go_in_place(play: Callable[..., None], write: Callable[[str, str], None]) -> None:
    async def scenario(server: Server) -> None:
        for count in (3, 1, 2):
            write("m", config("m", f"instance_group {{ count: {count} kind: KIND_CPU }}"))
            inferences = [asyncio.ensure_future(ask(server, value)) for value in range(20)]
            await server.load("m")
            assert await asyncio.gather(*inferences) == [2 * value for value in range(20)]
            assert await ask(server, 4) == 8
            assert set(server.explain("m")["runs_on"].values()) == {"event_loop"}
            assert len(server.explain("m")["runs_on"]) == count

    play(scenario, "instance_group { count: 1 kind: KIND_CPU }")
    assert [what for what, _ in Worries.seen].count("load") == 4  # none was made anew
    assert [what for what, _ in Worries.seen].count("close") == 4


def test_a_stop_answers_what_waits_for_a_batch(play: Callable[..., None]) -> None:
    answers: list[asyncio.Future[float]] = []

    async def scenario(server: Server) -> None:
        answers.append(asyncio.ensure_future(ask(server, 1)))
        while not server.served("m")[0].model_queue.pending:
            await asyncio.sleep(0)

    with pytest.raises(Unavailable):
        play(scenario, "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 600000000 }",
             exit_timeout_secs=0)  # fmt: skip
    assert isinstance(answers[0].exception(), Unavailable)
    assert executions() == []


def test_instances_that_share_a_resource_run_one_after_another(play: Callable[..., None]) -> None:
    async def scenario(server: Server) -> None:
        assert await asyncio.gather(*(ask(server, value) for value in range(30))) == [2 * value for value in range(30)]
        assert server.explain("m")["runs_on"] == {"m_0_0": "event_loop", "m_0_1": "event_loop"}

    limited = 'rate_limiter { resources { name: "R" count: 1 } }'
    play(scenario, f"instance_group {{ count: 2 kind: KIND_CPU {limited} }}", rate_limit="execution_count")
    assert executions() == ["execute 1"] * 30


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("bound", "", "runs on a thread of its own only"),
        ("m", 'parameters { key: "isolation" value { string_value: "process" } }', "processes of their own"),
    ],
)
def test_model_that_cannot_run_on_the_loop_is_refused_at_load(
    play: Callable[..., None], name: str, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: Server) -> None:
        raise AssertionError("it was loaded")

    with pytest.raises(HeadraceError, match="failed to load"):
        play(scenario, text, name)
    assert re.search(f"parameter 'event_loop' is 'on', but .*{why}", caplog.text)


@pytest.fixture
def all_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, an execution counts as short."""
    for name in ("SHORT_NS", "LONG_NS", "BLOCKED_NS"):
        monkeypatch.setattr(loop_policy, name, 1 << 62)
    monkeypatch.setattr(loop_policy, "SHARE", 0)


@pytest.mark.usefixtures("all_are_short")
def test_short_executions_move_to_the_loop_and_long_ones_back_to_the_thread(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: Server) -> None:
        for _ in range(loop_policy.WINDOW):
            assert server.explain("m")["runs_on"] == {"m_0": "thread"}
            assert await ask(server) == 2
        assert await ask(server) == 2
        assert server.explain("m")["runs_on"] == {"m_0": "event_loop"}
        monkeypatch.setattr(loop_policy, "LONG_NS", -1)
        assert await ask(server) == 2
        assert server.explain("m")["runs_on"] == {"m_0": "thread"}
        blocked = asyncio.ensure_future(ask(server, -3))
        while not Worries.entered.is_set():
            await asyncio.sleep(0)
        assert await ask(server, 5, "other") == 5  # others go on
        Worries.go_on.set()
        assert await blocked == -6

    play(scenario, AUTO)
    here, own = threading.current_thread().name, "headrace-m_0"
    ran = [name for what, name in Worries.seen if what.startswith("execute")]
    assert ran == [own] * loop_policy.WINDOW + [here] * 2 + [own]


@pytest.mark.usefixtures("all_are_short")
def test_instance_bound_to_its_thread_stays_there(play: Callable[..., None]) -> None:
    async def scenario(server: Server) -> None:
        for _ in range(3 * loop_policy.WINDOW):
            assert await ask(server, name="bound") == 1
        assert server.explain("bound")["runs_on"] == {"bound_0": "thread"}

    play(scenario, AUTO, "bound")


LIMITED = 'rate_limiter { resources { name: "R" count: 2 } }'


@pytest.mark.parametrize("text", [
    "",
    "instance_group { count: 3 kind: KIND_CPU }",
    "instance_group { count: 3 kind: KIND_CPU } dynamic_batching {}",
    "instance_group { count: 2 kind: KIND_CPU } dynamic_batching { preserve_ordering: true }",
    "instance_group { count: 2 kind: KIND_CPU } dynamic_batching { preferred_batch_size: 3 "
    "max_queue_delay_microseconds: 500 }",
    f"instance_group {{ count: 3 kind: KIND_CPU {LIMITED} }} dynamic_batching {{}}",
])  # fmt: skip
def test_instances_that_move_to_and_fro_at_any_batch_run_alone_and_lose_nothing(
    play: Callable[..., None], write: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    chance = random.Random(text)
    monkeypatch.setattr(loop_policy.LoopPolicy, "ran", lambda policy, start_ns, end_ns: chance.random() < 0.5)

    async def scenario(server: Server) -> None:
        async def keep_asking(number: int) -> None:
            for turn in range(40):
                value = float(number * 100 + turn)
                if turn % 9 == 5:
                    with pytest.raises(BackendError, match="minus one"):
                        await ask(server, -1)
                assert await ask(server, value) == 2 * value

        askers = [asyncio.ensure_future(keep_asking(number)) for number in range(12)]
        for count in (1, 2, 3):  # a version whose other instances or whose batching differ
            write("m", config("m", f"{AUTO} {text.replace('count: 3 kind', f'count: {count} kind')}"))
            await server.load("m")
        await asyncio.gather(*askers)
        assert server.served("m")[0].model_queue.in_flight == 0

    play(scenario, f"{AUTO} {text}", rate_limit="execution_count")
    here = threading.current_thread().name
    assert {name == here for what, name in Worries.seen if what.startswith("execute")} == {True, False}
    assert [what for what, _ in Worries.seen].count("load") == [what for what, _ in Worries.seen].count("close")
