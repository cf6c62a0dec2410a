"""From a directory to a model that serves, by the loader alone: plans, loads, shared objects and releases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace import (
    Backend,
    Batch,
    FullScheduler,
    Instance,
    InstanceInfo,
    LoadError,
    Model,
    ServerOptions,
    Tensors,
    Ticket,
    Wait,
)
from headrace.executors.threads import LoopMailbox
from headrace.messages.response import Answer, InferResponse
from headrace.models.loader import Loader, LoadPlan
from headrace.models.local_services import ModelCalls, ServerServices
from headrace.models.running_loads import LoadSlots, NestedLoads
from headrace.models.served import ServedModel
from headrace.models.serving_table import ServingTable
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace.schedulers.rate_limiter import RateLimiter
from headrace.storage.local_directory import LocalDirectory
from headrace.storage.repositories import Entry
from headrace.telemetry.custom import CustomMetrics
from tests.core.conftest import local_repositories, make_ticket

CONFIG = """backend: "doubles" max_batch_size: 8 {more}
input {{ name: "x" data_type: TYPE_FP32 dims: 1 }} output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}
"""
TESTS = PluginInfo("tests", "headrace-tests", "1.0")


class Doubling(Instance):
    def __init__(self, backend: DoublesBackend, model: Model) -> None:
        self.backend, self.name = backend, model.instance_name

    def execute(self, inputs: Tensors) -> Tensors:
        return {"y": np.asarray(inputs["x"]) * 2}

    def close(self) -> None:
        self.backend.closed.append(self.name)


class DoublesBackend(Backend):
    name: ClassVar[str] = "doubles"
    made: ClassVar[list[DoublesBackend]]
    fails_at: ClassVar[str] = ""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.made.append(self)
        self.loaded: list[str] = []
        self.closed: list[str] = []

    def load(self, model: Model) -> Doubling:
        self.loaded.append(model.instance_name)
        if model.instance_name == self.fails_at:
            raise ValueError("no such file")
        return Doubling(self, model)


class Remembers(FullScheduler):
    name = "remembers"
    is_stateful = True

    def next(self, instance: InstanceInfo, now_ns: int) -> Batch | Sequence[Ticket] | Wait:
        return self.context.waiting.head(1)


class Loading:
    """A loader with a backend and a scheduler of the tests, and the directories that are not released."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.options = ServerOptions(model_repository=(str(root),), **options)
        self.plugins = Plugins.discover(())
        DoublesBackend.made = []
        self.plugins.backends.add(DoublesBackend, TESTS)
        self.plugins.schedulers.add(Remembers, TESTS)
        self.limiter = RateLimiter(self.loop, ()) if self.options.rate_limit == "execution_count" else None
        calls = ModelCalls(self.loop, ServingTable(), None, self.limiter)
        control: Any = None  # no model of these tests loads another one
        loads = NestedLoads(LoadSlots(1))
        services = ServerServices(LoopMailbox(self.loop), calls, control, loads, CustomMetrics())
        self.loader = Loader(self.options, self.plugins, self.loop, services.siblings, limiter=self.limiter)
        self.repositories = local_repositories(root)
        self.fetched: list[LocalDirectory] = []
        self.given_back: list[LocalDirectory] = []

    def entry(self, name: str = "m") -> Entry:
        entry = self.repositories.find(name)
        assert entry is not None
        return entry

    async def plan(self, name: str = "m", loaded: Any = None) -> LoadPlan | None:
        return await asyncio.to_thread(lambda: self.loader.plan(self.entry(name), loaded))

    async def load(self, version: int = 1, plan: LoadPlan | None = None) -> ServedModel:
        plan = plan or await self.plan()
        assert plan is not None
        found = await asyncio.to_thread(plan.opened.fetch, version)
        directory = LocalDirectory(found.path, lambda: self.given_back.append(found))
        return await asyncio.to_thread(self.loader.load, plan, version, directory, {})

    async def close(self, model: ServedModel) -> None:
        await model.drain()
        model.close()
        await asyncio.to_thread(model.join)

    async def ask(self, model: ServedModel, value: float) -> Answer:
        answered: asyncio.Future[Answer] = self.loop.create_future()
        ticket = make_ticket(
            "m", {"x": np.full((1, 1), value, np.float32)}, lambda answer, _: answered.set_result(answer)
        )
        model.signature.check(ticket)
        model.model_queue.submit(ticket)
        return await asyncio.wait_for(answered, 20)


def write(root: Path, more: str = "", name: str = "m", versions: Sequence[int] = (1,)) -> Path:
    for version in versions:
        (root / name / str(version)).mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(CONFIG.format(more=more))
    return root


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_plan_has_the_versions_and_is_none_while_nothing_has_changed(tmp_path: Path) -> None:
    write(tmp_path, "version_policy { latest { num_versions: 2 } }", versions=(1, 2, 3))

    async def scenario() -> None:
        loading = Loading(tmp_path)
        plan = await loading.plan()
        assert plan is not None
        assert (plan.name, sorted(plan.versions)) == ("m", [2, 3])
        assert plan.config.input[0].name == "x"
        plan.opened.close(is_loaded=False)
        assert await loading.plan(loaded=plan.fingerprint) is None
        write(tmp_path, versions=(4,))
        changed = await loading.plan(loaded=plan.fingerprint)
        assert changed is not None
        assert sorted(changed.versions) == [4]

    run(scenario)


def test_a_model_in_two_repositories_is_refused(tmp_path: Path) -> None:
    roots = [write(tmp_path / "a"), write(tmp_path / "b")]

    async def scenario() -> None:
        loading = Loading(roots[0])
        loading.repositories = local_repositories(*roots)
        with pytest.raises(LoadError, match=r"^model appears in two or more repositories$"):
            await loading.plan()

    run(scenario)


def test_a_version_that_is_loaded_answers_until_it_closes(tmp_path: Path) -> None:
    write(tmp_path, "instance_group { count: 2 kind: KIND_CPU }")

    async def scenario() -> None:
        loading = Loading(tmp_path)
        model = await loading.load()
        assert (model.name, model.version, model.platform) == ("m", 1, "doubles")
        assert model.statistics.load_ns > 0
        answer = await loading.ask(model, 3)
        assert isinstance(answer, InferResponse)
        assert np.asarray(answer.outputs["y"]).tolist() == [[6]]
        assert not loading.given_back
        await loading.close(model)
        (backend,) = DoublesBackend.made
        assert sorted(backend.closed) == ["m_0_0", "m_0_1"]
        assert len(loading.given_back) == 1

    run(scenario)


def test_versions_and_models_share_one_backend(tmp_path: Path) -> None:
    write(tmp_path, "version_policy { all {} }", versions=(1, 2))
    write(tmp_path, name="other")

    async def scenario() -> None:
        loading = Loading(tmp_path)
        plans = [await loading.plan(), await loading.plan(), await loading.plan("other")]
        models = [await loading.load(version, plan) for version, plan in zip((1, 2, 1), plans, strict=True)]
        assert len(DoublesBackend.made) == 1
        assert [(model.name, model.version) for model in models] == [("m", 1), ("m", 2), ("other", 1)]
        for model in models:
            await loading.close(model)

    run(scenario)


def test_a_failed_load_releases_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = 'count: 3 kind: KIND_CPU rate_limiter { resources { name: "r" count: 3 } }'
    write(tmp_path, f"instance_group {{ {group} }}")
    monkeypatch.setattr(DoublesBackend, "fails_at", "m_0_2")

    async def scenario() -> None:
        loading = Loading(tmp_path, rate_limit="execution_count")
        with pytest.raises(LoadError, match="no such file"):
            await loading.load()
        (backend,) = DoublesBackend.made
        assert set(backend.closed) == set(backend.loaded) - {"m_0_2"}
        assert len(loading.given_back) == 1
        assert loading.limiter is not None
        assert loading.limiter.uses() == []
        monkeypatch.setattr(DoublesBackend, "fails_at", "")
        await loading.close(await loading.load())

    run(scenario)


def test_state_that_callers_might_not_find_again_is_refused_with_workers(tmp_path: Path) -> None:
    write(tmp_path, 'parameters { key: "scheduler" value { string_value: "remembers" } }')

    async def scenario() -> None:
        await (loading := Loading(tmp_path)).close(await loading.load())
        loading = Loading(tmp_path, workers=2)
        with pytest.raises(LoadError, match="its scheduler 'remembers' keeps state from one request to the next"):
            await loading.load()
        assert len(loading.given_back) == 1

    run(scenario)


def test_a_change_of_instances_keeps_those_that_stay(tmp_path: Path) -> None:
    write(tmp_path, "instance_group { count: 1 kind: KIND_CPU }")

    async def scenario() -> None:
        loading = Loading(tmp_path)
        model = await loading.load()
        write(tmp_path, "instance_group { count: 3 kind: KIND_CPU }")
        plan = await loading.plan()
        assert plan is not None
        prepared = await asyncio.to_thread(loading.loader.change, plan, model)
        (backend,) = DoublesBackend.made
        assert sorted(backend.loaded) == ["m_0_0", "m_0_1", "m_0_2"]  # new instances load side by side
        assert len(model.executors) == 1  # not yet
        model.replace_instances(prepared)
        assert len(model.executors) == 3
        assert backend.closed == []
        await loading.close(model)

    run(scenario)
