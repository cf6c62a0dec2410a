"""Instances that change while their version serves, as what Triton's own test of it counts: who is loaded and who is
closed. Through a server without ports, whose backend counts."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.backends.base import Backend, Call, DeferredInstance, Model
from headrace.errors import HeadraceError, OperatorError
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Ticket
from headrace.models import lifecycle
from headrace.registry import PluginInfo
from headrace.schedulers.base import InstanceInfo, Scheduler, Wait
from headrace.schedulers.dynamic import DynamicScheduler
from headrace.server import Server

MakeServer = Callable[..., Server]
ONE = {"x": np.ones((1, 2), np.float32)}
HEAD = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""
BATCHING = ["", "dynamic_batching { max_queue_delay_microseconds: 500 }"]


class Scene:
    """A server that serves ``m``, and what its backend has done."""

    def __init__(self, server: Server, write_model: Any, gated: Any, config: str) -> None:
        self.server, self.gated = server, gated
        self._write, self._config = write_model, config

    def write(self, groups: str, more: str = "") -> None:
        self._write("m", f'backend: "gated" {HEAD}{self._config}{more} {groups}')

    async def load(self, groups: str, more: str = "") -> tuple[int, int]:
        """Load with other groups; how many instances that has loaded, and closed."""
        before = len(self.gated.loaded), len(self.gated.closed)
        self.write(groups, more)
        await self.server.load("m", {})
        return len(self.gated.loaded) - before[0], len(self.gated.closed) - before[1]

    async def count(self, number: int) -> tuple[int, int]:
        return await self.load(group(number))

    async def ask(self) -> None:
        answer = await self.server.infer_async("m", ONE)
        assert np.array_equal(np.asarray(answer.outputs["y"]), ONE["x"])

    def begin(self, concurrency: int = 4) -> Callable[[], Awaitable[int]]:
        """Send requests all the time. The returned function ends it and returns their number. Raises the error of any
        request."""
        done = asyncio.Event()

        async def work() -> int:
            count = 0
            while not done.is_set():
                await self.ask()
                count += 1
            return count

        askers = [asyncio.ensure_future(work()) for _ in range(concurrency)]

        async def end() -> int:
            done.set()
            return sum(await asyncio.gather(*askers))

        return end


def group(count: int, kind: str = "CPU", more: str = "") -> str:
    return f"instance_group {{ count: {count} kind: KIND_{kind} {more} }}\n"


@pytest.fixture
def play(write_model: Any, make_server: MakeServer, gated: Any) -> Callable[..., None]:
    """Plays a scenario to a server that has loaded ``m`` with ``groups``."""

    def play(
        scenario: Callable[[Scene], Coroutine[Any, Any, None]], groups: str, config: str = "", **options: Any
    ) -> None:
        async def whole() -> None:
            server = make_server(model_control_mode="explicit", load_model=("m",), **options)
            scene = Scene(server, write_model, gated, config)
            scene.write(groups)
            async with server:
                await scenario(scene)
            assert len(gated.closed) == len(gated.loaded)  # whatever was loaded is closed, once

        asyncio.run(asyncio.wait_for(whole(), 90))

    return play


# ---------------------------------------------------------------------------
# Added and removed instances
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("config", BATCHING)
def test_only_the_difference_is_loaded_and_closed_and_no_request_fails(play: Any, config: str) -> None:
    async def scenario(scene: Scene) -> None:
        end = scene.begin()
        assert [await scene.count(number) for number in (4, 3, 4, 1, 8, 8)] == [
            (1, 0), (0, 1), (1, 0), (0, 3), (7, 0), (0, 0)
        ]  # fmt: skip
        assert await end() > 0

    play(scenario, group(3), config)


def test_a_count_of_zero_is_the_default_and_no_change_from_one(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        assert await scene.count(0) == (0, 0)
        await scene.ask()
        assert await scene.load("") == (0, 0)  # no group at all is one instance, too

    play(scenario, group(1))


def test_groups_may_be_reordered_and_renamed(play: Any) -> None:
    """The steps of Triton's test, with KIND_MODEL where it has GPUs."""

    async def scenario(scene: Scene) -> None:
        assert await scene.load(group(1) + group(3, "MODEL")) == (2, 1)
        assert await scene.load(group(3, "MODEL") + group(1)) == (0, 0)
        assert await scene.load(group(2, "MODEL") + group(2)) == (1, 1)
        assert await scene.load(group(2, "MODEL", 'name: "new"') + group(2, "CPU", 'name: "other"')) == (0, 0)
        assert await scene.load(group(4, "MODEL")) == (2, 2)
        await scene.ask()

    play(scenario, group(2) + group(1, "MODEL"))


def test_instances_that_take_other_resources_are_others(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        more = 'rate_limiter { resources { name: "R" count: 8 } }'
        assert await scene.load(group(1, more=more)) == (1, 1)
        for _ in range(8):
            await scene.ask()
        assert await scene.load(group(2, more=more)) == (1, 0)
        end = scene.begin()
        assert await scene.load(group(2)) == (2, 2)
        assert await end() > 0

    limited = group(1, more='rate_limiter { resources { name: "R" count: 2 } }')
    play(scenario, limited, rate_limit="execution_count")


def test_an_instance_that_is_removed_no_longer_sets_how_much_of_a_resource_there_is(play: Any) -> None:
    """There are as many units as the instance needs that needs most."""

    def units(scene: Scene) -> list[int]:
        assert scene.server._limiter is not None
        return [use.units for use in scene.server._limiter.uses()]

    async def scenario(scene: Scene) -> None:
        assert units(scene) == [8]
        await scene.load(group(1, more='rate_limiter { resources { name: "R" count: 2 } }'))
        assert units(scene) == [2]
        await scene.load(group(1))
        assert units(scene) == []

    limited = group(1, more='rate_limiter { resources { name: "R" count: 8 } }')
    play(scenario, limited, rate_limit="execution_count")


def test_instances_that_stay_are_the_same_and_new_ones_have_names_of_their_own(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        (served,) = scene.server.served("m")
        first, second = served.executors
        await scene.load(group(1, "MODEL") + group(2))
        assert (served.executors[1], served.executors[2]) == (first, second)
        names = [executor.name for executor in served.executors]
        assert len(set(names)) == 3
        assert scene.server.served("m") == [served]

    play(scenario, group(2))


def test_an_invalid_config_in_between_changes_nothing(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        end = scene.begin()
        wrongs = "instance_group { count: -1 }", "--- invalid config ---", group(2, "GPU"), group(4, "CPU", "gpus: [0]")
        for wrong in wrongs:
            before = list(scene.gated.loaded), list(scene.gated.closed)
            with pytest.raises(HeadraceError):
                await scene.load(wrong)
            assert (list(scene.gated.loaded), list(scene.gated.closed)) == before
        assert await scene.count(4) == (0, 4)
        assert await end() > 0

    play(scenario, group(8))


def test_if_a_new_instance_cannot_be_loaded_nothing_changes(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        end = scene.begin()
        scene.gated.failing.add(1)
        with pytest.raises(OperatorError, match="version 1 is broken"):
            await scene.count(5)
        scene.gated.failing.clear()
        assert len(scene.gated.loaded) == 2
        assert [(entry.state, entry.reason) for entry in scene.server.index()] == [("READY", "")]
        assert await scene.count(3) == (1, 0)
        assert await end() > 0

    play(scenario, group(2))


@pytest.mark.parametrize("more", ['parameters { key: "a" value { string_value: "b" } }', "batch_output { }"])
def test_change_beyond_instances_reloads_everything_or_nothing(play: Any, more: str) -> None:
    async def scenario(scene: Scene) -> None:
        if "batch_output" in more:
            with pytest.raises(HeadraceError):
                await scene.load(group(2), more)
            assert len(scene.gated.loaded) == 4
            return
        await scene.load(group(2), more)
        while len(scene.gated.closed) < 4:
            await asyncio.sleep(0)
        assert len(scene.gated.loaded) == 6

    play(scenario, group(4))


def test_a_changed_file_reloads_everything(play: Any, repository: Path) -> None:
    async def scenario(scene: Scene) -> None:
        (repository / "m" / "1" / "weights").write_text("new")
        assert (await scene.count(6))[0] == 6
        while len(scene.gated.closed) < 5:
            await asyncio.sleep(0)

    play(scenario, group(5))


def test_the_config_of_a_load_changes_instances_and_a_plain_load_changes_them_back(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        (served,) = scene.server.served("m")
        config = scene.server.resolve("m").view.config
        described = {
            "backend": "gated", "max_batch_size": 8, "instance_group": [{"count": 3, "kind": "KIND_CPU"}],
            "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["-1"]}],
            "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": ["-1"]}],
        }  # fmt: skip
        await scene.server.load("m", {"config": json.dumps(described)})
        assert (len(scene.gated.loaded), len(scene.gated.closed)) == (3, 0)
        shown = scene.server.resolve("m").view.config
        assert [group.count for group in shown.instance_group] == [3]
        assert [group.count for group in config.instance_group] == [1]  # the old object is unchanged
        assert await scene.count(2) == (0, 1)
        assert scene.server.served("m") == [served]

    play(scenario, group(1))


def test_statistics_go_on(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        (served,) = scene.server.served("m")
        for number in (3, 1, 2, 1, 4):
            await scene.ask()
            await scene.count(number)
        await scene.ask()
        assert served.snapshot().executions.inference_count == 6
        assert len(served.statistics.instances) <= 2 * 4 + 2  # the counts of removed instances are one

    play(scenario, group(2))


# ---------------------------------------------------------------------------
# Ways to remove an instance
# ---------------------------------------------------------------------------


def test_a_leaving_instance_ends_its_batch_and_the_load_does_not_wait_for_ever(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LEAVING_S", 0.01)

    async def scenario(scene: Scene) -> None:
        scene.gated.gate.clear()
        inferences = [asyncio.ensure_future(scene.ask()) for _ in range(3)]
        (served,) = scene.server.served("m")
        while sum(bool(executor.executing) for executor in served.executors) < 3:
            await asyncio.sleep(0)
        assert await scene.count(1) == (0, 0)
        assert len(served.executors) == 1
        scene.gated.gate.set()
        await asyncio.gather(*inferences)
        while len(scene.gated.closed) < 2:
            await asyncio.sleep(0)
        await scene.ask()

    play(scenario, group(3))


@pytest.mark.parametrize("how", ["unload", "stop"])
def test_a_version_may_go_while_one_of_its_instances_is_leaving(
    play: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(lifecycle, "LEAVING_S", 0.01)

    async def scenario(scene: Scene) -> None:
        scene.gated.gate.clear()
        inferences = [asyncio.ensure_future(scene.ask()) for _ in range(2)]
        (served,) = scene.server.served("m")
        while sum(bool(executor.executing) for executor in served.executors) < 2:
            await asyncio.sleep(0)
        await scene.count(1)
        threading.Timer(0.05, scene.gated.gate.set).start()
        if how == "unload":
            await scene.server.unload("m")
        await asyncio.gather(*inferences)

    play(scenario, group(2))


def test_a_batch_that_a_removed_idle_instance_did_not_take_runs_on_another(play: Any) -> None:
    """Many at once, again and again: none may be left in the queue."""

    async def scenario(scene: Scene) -> None:
        pick = random.Random(1)
        for _ in range(40):
            inferences = [asyncio.ensure_future(scene.ask()) for _ in range(pick.randint(1, 30))]
            for _ in range(pick.randint(0, 3)):
                await asyncio.sleep(0)
            await scene.count(pick.randint(1, 4))
            await asyncio.gather(*inferences)

    play(scenario, group(4))


class Later(DeferredInstance):
    """Answers when the test calls it, and ends its calls when it is closed."""

    calls: ClassVar[list[tuple[Later, Call]]]
    closed: ClassVar[list[Later]]

    def accept(self, calls: Sequence[Call]) -> None:
        Later.calls += [(self, call) for call in calls]

    def close(self) -> None:
        Later.closed.append(self)


class LaterBackend(Backend):
    name = "later"

    def load(self, model: Model) -> Later:
        return Later()


def test_an_instance_with_open_calls_is_closed_after_their_answers(
    write_model: Any, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LEAVING_S", 0.01)
    Later.calls, Later.closed = [], []
    head = f'backend: "later" {HEAD}'

    async def whole() -> None:
        write_model("m", head + group(2))
        server = make_server(model_control_mode="explicit", load_model=("m",))
        server.plugins.backends.add(LaterBackend, PluginInfo("later", "tests", "0"))
        async with server:
            inferences = [asyncio.ensure_future(server.infer_async("m", ONE)) for _ in range(8)]
            while len(Later.calls) < 8:
                await asyncio.sleep(0)
            write_model("m", head + group(1, "MODEL"))
            await server.load("m", {})
            assert not {instance for instance, _ in Later.calls}.intersection(Later.closed)
            for _, call in Later.calls:
                call.send(InferResponse({"y": ONE["x"]}))
            await asyncio.gather(*inferences)
            while len(Later.closed) < 2:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(whole(), 90))


# ---------------------------------------------------------------------------
# Schedulers that have to do with instances
# ---------------------------------------------------------------------------


class Bound(DynamicScheduler):
    """A scheduler with one bound instance, until the test releases it."""

    name = "bound"
    instances_alike = False
    on_threads = False
    bound: ClassVar[set[str]] = set()
    seen: ClassVar[list[list[str]]] = []

    def instances_changed(self) -> None:
        Bound.seen.append([instance.name for instance in self.context.instances])

    def lets_go(self, instance: InstanceInfo) -> bool:
        return instance.name not in Bound.bound


class Fixed(Scheduler):
    """Gets its instances at the start, and is never notified of others."""

    name = "fixed"

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        assert instance in self.instances
        return self.context.waiting.head(1)

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.instances = set(context.instances)


@pytest.fixture
def scheduled(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`play` with the schedulers of this test."""
    made = make_server

    def make(**options: Any) -> Server:
        server = made(**options)
        for kind in (Bound, Fixed):
            server.plugins.schedulers.add(kind, PluginInfo("schedulers", "tests", "0"))
        return server

    return make


def choose(name: str) -> str:
    return f'parameters {{ key: "scheduler" value {{ string_value: "{name}" }} }}'


def test_a_scheduler_decides_when_an_instance_may_be_removed(
    scheduled: Any, write_model: Any, gated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LEAVING_S", 0.01)
    Bound.bound, Bound.seen = {"m_0_1"}, []

    async def whole() -> None:
        server = scheduled(model_control_mode="explicit", load_model=("m",))
        scene = Scene(server, write_model, gated, choose("bound"))
        scene.write(group(2))
        async with server:
            assert await scene.count(1) == (0, 0)
            assert Bound.seen == [["m_0_0"]]
            for _ in range(10):
                await scene.ask()
            assert not gated.closed
            Bound.bound = set()
            while not gated.closed:
                await scene.ask()
            assert gated.closed == ["m_0_1/1"]
            Bound.bound = {"m_0_0", "m_0_1"}
            await scene.load(group(1, "MODEL"))  # and if it is never let go, the version's end is its end
        assert len(gated.closed) == len(gated.loaded) == 3

    asyncio.run(asyncio.wait_for(whole(), 90))


def test_a_scheduler_without_instances_changed_gets_a_full_reload(scheduled: Any, write_model: Any, gated: Any) -> None:
    async def whole() -> None:
        server = scheduled(model_control_mode="explicit", load_model=("m",))
        scene = Scene(server, write_model, gated, choose("fixed"))
        scene.write(group(2))
        async with server:
            end = scene.begin()
            assert (await scene.count(3))[0] == 3
            assert await end() > 0

    asyncio.run(asyncio.wait_for(whole(), 90))
