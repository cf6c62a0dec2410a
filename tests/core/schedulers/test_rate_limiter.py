"""Models that share resources: simulated on the model queues of several models at once, whose instances the test
plays."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from headrace.backends.base import Device, Instance, Tensors
from headrace.config.model_config_pb2 import ModelConfig, ModelRateLimiter
from headrace.config.option_parts import RateLimitResource
from headrace.errors import BackendError, Code, ConfigError, Unavailable
from headrace.executors.devices import Placement, Resource, ResourceDemand
from headrace.executors.instance import runner_for
from headrace.executors.instance_thread import InstanceThread
from headrace.executors.output_schema import OutputSchema
from headrace.executors.threads import LoopWakeup
from headrace.messages import dtypes
from headrace.messages.response import Answer, InferResponse
from headrace.messages.spec import Spec
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import ScheduledModel, Scheduler
from headrace.schedulers.dynamic import DirectScheduler, DynamicScheduler
from headrace.schedulers.instance_info import instance_info
from headrace.schedulers.instance_source import InstanceSource
from headrace.schedulers.model_queue import ModelQueue
from headrace.schedulers.rate_limiter import LimitedSource, RateLimiter
from headrace.schedulers.resource_use import ResourceUse
from headrace.telemetry.statistics import ModelStatistics
from headrace_testing.simulated_parts import ManualClock
from headrace_testing.simulator import run_scenario
from tests.core.conftest import make_ticket

MS = 1_000_000
R, GLOBAL = Resource("R", 0), Resource("G")


class Player:
    """An instance that the test plays: it runs its batch until `finish`."""

    def __init__(self, scenario: Scene, source: InstanceSource, demand: ResourceDemand) -> None:
        self.source, self.batch, self.runs, self.is_dead = source, list[Ticket](), 0, False
        self.name, self.demand = source.instance.name, demand
        self._scene, self._wakeup = scenario, LoopWakeup(self.ask)

    def ask(self) -> None:
        if self.batch or self.is_dead:
            return
        self.batch = self.source.poll(self._wakeup) or []
        if self.batch:
            self.runs += 1
            self._scene.order.append(self.name)
            self._scene.check()

    def finish(self, answer: Answer = None) -> None:
        batch, self.batch = self.batch, []
        self.source.deliver(batch, [answer or InferResponse({})] * len(batch))
        self.ask()

    def die(self) -> None:
        batch, self.batch, self.is_dead = self.batch, [], True
        self.source.deliver(batch, [Unavailable("died")] * len(batch))
        self.source.stop_polling(self._wakeup)

    def rise(self) -> None:
        self.is_dead = False
        self.ask()


class Scene:
    """Models behind one limiter. ``order`` has the name of each instance that began to run."""

    def __init__(self, *resources: RateLimitResource) -> None:
        self.clock, self.loop = ManualClock(), asyncio.get_running_loop()
        self.limiter = RateLimiter(self.loop, resources)
        self.model_queues: dict[str, ModelQueue] = {}
        self.players: list[Player] = []
        self.order: list[str] = []
        self.answers: list[Answer] = []

    def model(
        self,
        name: str,
        *demands: ResourceDemand,
        kind: type[Scheduler] = DirectScheduler,
        rows: int = 4,
        delay_us: int = 0,
    ) -> list[Player]:
        """A model with an instance for each of ``demands``, all asking."""
        players = self.played(name, *demands, kind=kind, rows=rows, delay_us=delay_us)
        for player in players:
            player.ask()
        return players

    def played(
        self, name: str, *demands: ResourceDemand, kind: type[Scheduler], rows: int, delay_us: int = 0
    ) -> list[Player]:
        model_queue = self.model_queue(name, *demands, kind=kind, rows=rows, delay_us=delay_us)
        players = [Player(self, source, demand) for source, demand in zip(model_queue.sources, demands, strict=True)]
        self.players += players
        return players

    def model_queue(
        self,
        name: str,
        *demands: ResourceDemand,
        kind: type[Scheduler] = DirectScheduler,
        rows: int = 4,
        delay_us: int = 0,
    ) -> ModelQueue:
        self.limiter.add(demands)
        config = ModelConfig(name=name, max_batch_size=rows)
        config.dynamic_batching.max_queue_delay_microseconds = delay_us
        infos = [
            instance_info(Placement(f"{name}_{n}", Device("cpu"), demand), config) for n, demand in enumerate(demands)
        ]
        model, statistics = ScheduledModel(config, infos), ModelStatistics()
        model_queue = self.model_queues[name] = ModelQueue(kind, model, statistics, self.loop, self.clock, self.limiter)
        return model_queue

    def send(self, name: str, count: int = 1) -> list[Ticket]:
        x = {"x": np.ones((1, 1), np.float32)}
        tickets = [make_ticket(name, x, lambda answer, final: self.answers.append(answer)) for _ in range(count)]
        for ticket in tickets:
            self.model_queues[name].submit(ticket)
        return tickets

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    @property
    def running(self) -> list[Player]:
        return [player for player in self.players if player.batch]

    def taken(self) -> dict[Resource, int]:
        """Return the units that running instances use, added up by the test."""
        taken: dict[Resource, int] = {}
        for player in self.running:
            for resource, units in player.demand.units.items():
                taken[resource] = taken.get(resource, 0) + units
        return taken

    def check(self) -> None:
        assert self.taken().items() <= dict(self.limiter.in_use).items()
        limits = self.limiter._limits
        assert all(units <= limits[resource] for resource, units in self.limiter.in_use.items())
        in_use = {use.resource: sum(use.used_by.values()) for use in self.limiter.uses()}
        assert {resource: units for resource, units in in_use.items() if units} == dict(self.limiter.in_use)

    async def finish_one(self) -> None:
        self.running[0].finish()
        await self.settle()


def demand(priority: int = 1, **units: int) -> ResourceDemand:
    return ResourceDemand(
        {Resource(name.removesuffix("_everywhere"), None if "_" in name else 0): n for name, n in units.items()},
        priority,
    )


# ---------------------------------------------------------------------------
# One after the other
# ---------------------------------------------------------------------------


def test_instances_of_two_models_that_need_the_same_never_run_together() -> None:
    async def scenario() -> None:
        stage = Scene()
        stage.model("a", demand(R=1))
        stage.model("b", demand(R=1))
        stage.send("a", 3), stage.send("b", 3)
        await stage.settle()
        for _ in range(6):
            assert len(stage.running) == 1
            await stage.finish_one()
        assert sorted(stage.order) == ["a_0"] * 3 + ["b_0"] * 3
        assert len(stage.answers) == 6
        assert not stage.limiter.in_use

    run_scenario(scenario)


def test_models_without_shared_resources_do_not_wait_for_each_other() -> None:
    async def scenario() -> None:
        stage = Scene()
        stage.model("a", demand(R=1))
        stage.model("b", demand(S=1))
        stage.model("c", ResourceDemand())
        for name in "abc":
            stage.send(name)
        await stage.settle()
        assert {player.name for player in stage.running} == {"a_0", "b_0", "c_0"}

    run_scenario(scenario)


def test_instance_that_waits_for_one_resource_does_not_delay_instances_that_need_another() -> None:
    async def scenario() -> None:
        stage = Scene()
        stage.model("holds", demand(R=1))
        stage.model("waits", demand(R=1))
        stage.model("other", demand(S=1))
        for _ in range(3):  # by its executions it is behind
            stage.send("other")
            await stage.settle()
            await stage.finish_one()
        for name in ("holds", "waits", "other"):
            stage.send(name)
            await stage.settle()
        assert {player.name for player in stage.running} == {"holds_0", "other_0"}

    run_scenario(scenario)


def test_the_default_limit_is_the_largest_demand() -> None:
    async def scenario() -> None:
        stage = Scene()
        stage.model("little", *(demand(R=1) for _ in range(4)))
        stage.send("little", 4)
        await stage.settle()
        assert len(stage.running) == 1  # there is one unit
        stage.model("much", demand(R=3))
        await stage.settle()
        assert len(stage.running) == 3  # and now there are three

    run_scenario(scenario)


def test_resources_are_per_device_unless_global() -> None:
    async def scenario() -> None:
        stage = Scene()
        for device in (0, 1):
            stage.model(f"own{device}", ResourceDemand({Resource("R", device): 1}))
            stage.model(f"all{device}", ResourceDemand({GLOBAL: 1}))
            stage.send(f"own{device}"), stage.send(f"all{device}")
        await stage.settle()
        assert sorted(player.name for player in stage.running) == ["all0_0", "own0_0", "own1_0"]

    run_scenario(scenario)


def test_requests_cancelled_while_their_model_waits_let_others_run() -> None:
    async def scenario() -> None:
        stage = Scene(RateLimitResource("R", 4))
        stage.model("runs", demand(R=2))
        stage.model("big", demand(R=4))
        stage.model("small", demand(R=2))
        stage.send("runs")
        await stage.settle()
        (waiting,) = stage.send("big")
        await stage.settle()
        stage.send("small")
        await stage.settle()
        assert [player.name for player in stage.running] == ["runs_0"]  # who needs much is not passed
        waiting.cancel()
        await stage.settle()
        assert [player.name for player in stage.running] == ["runs_0", "small_0"]

    run_scenario(scenario)


def test_an_instance_that_stops_waiting_is_not_compensated_for_missed_runs() -> None:
    """Instances that ran meanwhile have overtaken it. If it waits again, it is treated as new."""

    async def scenario() -> None:
        stage = Scene(RateLimitResource("R", 4))
        (runs,) = stage.model("runs", demand(R=2))
        (big,) = stage.model("big", demand(R=4))
        (late,) = stage.model("late", demand(3, R=2))
        stage.send("runs")
        await stage.settle()
        (waiting,) = stage.send("big")
        await stage.settle()
        assert isinstance(big.source, LimitedSource)
        stage.limiter.acquire(late.source)  # type: ignore[arg-type]  # as if it had come first
        assert big.source.overtaken == 1
        waiting.cancel()
        await stage.settle()
        assert not stage.limiter.is_waiting(big.source)
        assert big.source.overtaken == 0
        assert runs.batch

    run_scenario(scenario)


def test_an_instance_that_forms_a_batch_holds_nothing_meanwhile() -> None:
    async def scenario() -> None:
        stage = Scene()
        stage.model("forms", demand(R=1), kind=DynamicScheduler, delay_us=5000)
        stage.model("quick", demand(R=1))
        stage.send("forms")
        await stage.settle()
        stage.send("quick")
        await stage.settle()
        assert [player.name for player in stage.running] == ["quick_0"]
        stage.clock.advance(6 * MS)  # its time is over, and the other still runs
        await stage.settle()
        assert [player.name for player in stage.running] == ["quick_0"]
        await stage.finish_one()
        assert [player.name for player in stage.running] == ["forms_0"]

    run_scenario(scenario)


def test_a_batch_grows_while_its_instance_waits_for_resources() -> None:
    async def scenario() -> None:
        stage = Scene()
        stage.model("other", demand(R=1))
        (batcher,) = stage.model("batches", demand(R=1), kind=DynamicScheduler, rows=8)
        stage.send("other")
        await stage.settle()
        for _ in range(5):
            stage.send("batches")
            await stage.settle()
        await stage.finish_one()
        assert len(batcher.batch) == 5

    run_scenario(scenario)


def test_the_limiter_reports_used_and_awaited_resources_and_the_batches_that_waited() -> None:
    async def scenario() -> None:
        stage = Scene(RateLimitResource("R", 4), RateLimitResource("G", 1))
        stage.model("small", demand(R=1), demand(R=1))
        stage.model("large", demand(R=3, G_everywhere=1))
        stage.model("other", demand(G_everywhere=1))

        def resource_use(name: str) -> list[tuple[Any, ...]]:
            uses = stage.limiter.uses(tuple(stage.model_queues[name].instances))
            return [(use.resource, use.units, dict(use.used_by), dict(use.wanted_by)) for use in uses]

        def reasons(name: str) -> list[str]:
            return list(stage.model_queues[name].history.document(0)["reasons"])

        assert resource_use("large") == [(GLOBAL, 1, {}, {}), (R, 4, {}, {})]
        stage.send("small", 2)
        await stage.settle()
        stage.send("large", 2)
        await stage.settle()
        waits = [(GLOBAL, 1, {}, {"large_0": 1}), (R, 4, {"small_0": 1, "small_1": 1}, {"large_0": 3})]
        assert resource_use("large") == waits
        assert resource_use("small") == waits[1:]
        assert [use.measure() for use in stage.limiter.uses()] == [
            dict(zip((metric.name for metric in ResourceUse.metrics), values, strict=True))
            for values in ((1, 0, 1), (4, 2, 1))
        ]
        assert [use.labels for use in stage.limiter.uses()] == [{"resource": "G"}, {"device": "0", "resource": "R"}]
        await stage.finish_one()
        assert resource_use("other") == [(GLOBAL, 1, {"large_0": 1}, {})]
        while stage.running:
            await stage.finish_one()
        assert resource_use("large") == [(GLOBAL, 1, {}, {}), (R, 4, {}, {})]
        assert (reasons("small"), reasons("large")) == (["idle_instance"], ["resources", "idle_instance"])

    run_scenario(scenario)


# ---------------------------------------------------------------------------
# The order
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("priorities", [(1, 1), (1, 2), (1, 3, 6), (0, 1), (2, 5, 7, 7)])
def test_models_that_always_have_requests_run_in_proportion_to_their_priorities(priorities: tuple[int, ...]) -> None:
    """Arithmetic: with what counts being executions times priority, all are always within one execution of each
    other, so that over many executions each has its share of 1 / priority."""

    async def scenario() -> None:
        stage = Scene()
        weights = [max(priority, 1) for priority in priorities]
        for number, priority in enumerate(priorities):
            config = ModelRateLimiter(priority=priority)
            config.resources.add(name="R", count=1)
            stage.model(f"m{number}", ResourceDemand.from_config(config, Device("cpu")))
            stage.send(f"m{number}", 400)
        await stage.settle()
        for _ in range(300):
            scaled = [player.runs * weight for player, weight in zip(stage.players, weights, strict=True)]
            assert max(scaled) - min(scaled) <= max(weights)
            await stage.finish_one()
        shares = sum(1 / weight for weight in weights)
        for player, weight in zip(stage.players, weights, strict=True):
            assert player.runs == pytest.approx(300 / weight / shares, abs=2)

    run_scenario(scenario)


def test_at_equal_rank_the_better_priority_runs_first_and_not_the_longer_wait() -> None:
    """With priorities 1 and 2 the second runs once for two of the first at any moment, and never early."""

    async def scenario() -> None:
        stage = Scene()
        for name, priority in (("first", 1), ("second", 2)):
            stage.model(name, demand(priority, R=1))
            stage.send(name, 100)
        await stage.settle()
        first, second = stage.players
        for _ in range(100):
            assert 2 * second.runs <= first.runs + 1
            await stage.finish_one()

    run_scenario(scenario)


def test_one_that_needs_everything_is_not_starved_by_those_that_need_little() -> None:
    async def scenario() -> None:
        stage = Scene(RateLimitResource("R", 4))
        for number in range(4):
            stage.model(f"small{number}", demand(R=1))
            stage.send(f"small{number}", 200)
        stage.model("big", demand(R=4))
        stage.send("big", 200)
        await stage.settle()
        generator = random.Random(1)
        for _ in range(400):
            generator.choice(stage.running).finish()
            await stage.settle()
        runs = {player.name: player.runs for player in stage.players}
        assert max(runs.values()) - min(runs.values()) <= 2, runs

    run_scenario(scenario)


def test_a_new_instance_does_not_starve_older_ones() -> None:
    async def scenario() -> None:
        stage = Scene()
        (old,) = stage.model("old", demand(R=1))
        stage.send("old", 1000)
        await stage.settle()
        for _ in range(500):
            await stage.finish_one()
        (new,) = stage.model("new", demand(R=1))
        stage.send("new", 300)
        await stage.settle()
        before, gap, longest = old.runs, 0, 0
        for _ in range(200):
            runs = old.runs
            await stage.finish_one()
            gap = 0 if old.runs > runs else gap + 1
            longest = max(longest, gap)
        assert longest <= 8
        assert new.runs > old.runs - before  # it has the better part until it has caught up

    run_scenario(scenario)


# ---------------------------------------------------------------------------
# Resources are always returned
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_resources_are_never_exceeded_and_all_are_returned(seed: int) -> None:
    """Random needs, arrivals, cancellations, failures, deaths, restarts and removals: never more is taken than there
    is, everybody is answered, and in the end all is free."""
    pick = random.Random(seed)

    async def scenario() -> None:
        stage = Scene(RateLimitResource("R", 4), RateLimitResource("S", 2), RateLimitResource("G", 3))
        demands: dict[str, list[ResourceDemand]] = {}
        for number in range(5):
            name = f"m{number}"
            demands[name] = [_any_demand(pick) for _ in range(pick.randint(1, 3))]
            kind = pick.choice((DirectScheduler, DynamicScheduler))
            stage.model(name, *demands[name], kind=kind, delay_us=pick.choice((0, 2000)))
        sent = 0
        tickets: list[Ticket] = []
        for _ in range(400):
            name, player = pick.choice(sorted(stage.model_queues)), pick.choice(stage.players)
            happens = pick.random()
            if happens < 0.4:
                count = pick.randint(1, 3)
                sent += count
                tickets += stage.send(name, count)
            elif happens < 0.75:
                if player.batch:
                    player.finish(BackendError("failed") if pick.random() < 0.2 else None)
            elif happens < 0.85 and tickets:
                tickets.pop(pick.randrange(len(tickets))).cancel()
            elif happens < 0.9:
                player.rise() if player.is_dead else player.die()
            else:
                stage.clock.advance(pick.randint(1, 3) * MS)
            for _ in range(pick.randint(0, 6)):
                await asyncio.sleep(0)
            stage.check()
        for player in stage.players:
            if player.is_dead:
                player.rise()
        for _ in range(10_000):
            await stage.settle()
            if not any(model_queue.in_flight for model_queue in stage.model_queues.values()):
                break
            if stage.running:
                pick.choice(stage.running).finish()
            else:
                stage.clock.advance(MS)
            stage.check()
        assert len(stage.answers) == sent
        await stage.settle()
        assert not stage.limiter.in_use
        assert not stage.limiter._waiting
        for name in stage.model_queues:
            stage.model_queues[name].close()
            stage.limiter.remove(demands[name])
        await stage.settle()
        assert not stage.limiter._demands
        assert not stage.limiter._sources
        assert stage.limiter.uses() == []

    run_scenario(scenario)


def _any_demand(pick: random.Random) -> ResourceDemand:
    units = {R: pick.randint(1, 4), Resource("S", 0): pick.randint(1, 2), GLOBAL: pick.randint(1, 3)}
    return ResourceDemand(dict(pick.sample(sorted(units.items(), key=str), pick.randint(0, 3))), pick.randint(1, 4))


@pytest.mark.parametrize("end", ["abandon", "remove", "die"])
def test_resources_of_an_instance_that_hangs_are_freed_when_it_is_removed(end: str) -> None:
    async def scenario() -> None:
        stage = Scene()
        needs = demand(R=1)
        (hangs,) = stage.model("hangs", needs)
        stage.model("waits", demand(R=1))
        stage.send("hangs"), stage.send("waits")
        await stage.settle()
        assert stage.running == [hangs]
        if end == "die":
            hangs.die()
        elif end == "remove":
            hangs.demand = demand()  # its batch uses no resources any more
            stage.limiter.remove([needs])
        else:
            stage.model_queues["hangs"].abandon()
            hangs.finish()
        await stage.settle()
        assert "waits_0" in {player.name for player in stage.running}

    run_scenario(scenario)


# ---------------------------------------------------------------------------
# Threads
# ---------------------------------------------------------------------------


class Watched(Instance):
    """Runs for a moment, and counts how many of them run at once. It would take several calls, but is limited."""

    concurrency = 2
    running = most = 0
    lock = threading.Lock()

    def execute(self, inputs: Tensors) -> Tensors:
        with Watched.lock:
            Watched.running += 1
            Watched.most = max(Watched.most, Watched.running)
        total = float(np.ones(20_000).sum())
        with Watched.lock:
            Watched.running -= 1
        return {"y": np.asarray(inputs["x"]) + total}


@pytest.mark.parametrize(("units", "most"), [(2, 1), (1, 2)])
def test_threads_run_only_as_many_batches_at_once_as_resources_allow(units: int, most: int) -> None:
    async def scenario() -> None:
        Watched.running = Watched.most = 0
        stage = Scene(RateLimitResource("R", 2))
        spec = {"y": Spec("y", dtypes.FP32, (1,))}
        threads = []
        for name in ("a", "b"):
            model_queue = stage.model_queue(name, demand(R=units), demand(R=units))
            for source in model_queue.sources:
                load = partial(_loaded, OutputSchema(name, "1", spec, True))
                thread = InstanceThread(source.instance.name, load, model_queue.statistics.for_instance)
                await asyncio.to_thread(thread.load)
                thread.serve(source, stage.loop)
                threads.append(thread)
        for _ in range(100):
            stage.send("a"), stage.send("b")
            await asyncio.sleep(0)
        while any(model_queue.in_flight for model_queue in stage.model_queues.values()):
            await asyncio.sleep(0)
        assert len(stage.answers) == 200
        assert all(isinstance(answer, InferResponse) for answer in stage.answers)
        assert Watched.most <= most
        for model_queue in stage.model_queues.values():
            model_queue.close()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        await stage.settle()
        assert not stage.limiter.in_use

    run_scenario(scenario)


def _loaded(schema: OutputSchema) -> Any:
    instance = Watched()
    return instance, runner_for(instance, schema)


# ---------------------------------------------------------------------------
# Limits
# ---------------------------------------------------------------------------


LIMITED = (
    'Resource count for "R" is limited to {} which will prevent scheduling of one or more model instances, the minimum '
    "required count is 4"
)


@pytest.mark.parametrize(
    ("resources", "units", "text"),
    [
        ((RateLimitResource("R", 3),), {R: 4}, LIMITED.format(3)),
        ((RateLimitResource("R", 9, 1),), {R: 4}, LIMITED.format(0)),
        ((RateLimitResource("S", 9),), {R: 4}, LIMITED.format(0)),
        (
            (),
            {R: 1, Resource("R"): 1},
            'Resource "R" is present as both global and device-specific resource in the model configuration.',
        ),
    ],
)
def test_an_instance_that_could_never_run_is_refused_and_the_others_go_on(
    resources: Sequence[RateLimitResource], units: Mapping[Resource, int], text: str
) -> None:
    async def scenario() -> None:
        stage = Scene(*resources)
        if not resources:
            stage.model("other", demand(R=2))
        before = dict(stage.limiter._limits)
        with pytest.raises(ConfigError) as refusal:
            stage.model("m", ResourceDemand(units))
        assert (refusal.value.message, refusal.value.code) == (text, Code.INVALID_ARGUMENT)
        assert stage.limiter._limits == before

    run_scenario(scenario)


def test_a_device_is_that_of_a_gpu_and_0_elsewhere() -> None:
    config = ModelRateLimiter(priority=3)
    config.resources.add(name="R", count=4)
    config.resources.add(name="G", count=5, **{"global": True})
    demands = [
        ResourceDemand.from_config(config, device) for device in (Device("cpu"), Device("gpu", 2), Device("model"))
    ]
    assert [demand.units for demand in demands] == [{Resource("R", n): 4, GLOBAL: 5} for n in (0, 2, 0)]
    assert demands[0].priority == 3


def test_instance_without_resources_still_uses_the_limiter() -> None:
    async def scenario() -> None:
        stage = Scene()
        plain, limited = stage.model_queue("plain", ResourceDemand()), stage.model_queue("limited", demand(R=1))
        assert [type(model_queue.sources[0]) for model_queue in (plain, limited)] == [InstanceSource, LimitedSource]
        assert (plain.threads_take, limited.threads_take) == (True, False)

    run_scenario(scenario)
