"""Loads that wait for room: their order, immediate refusals, and no harm to other loads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Collection
from time import monotonic_ns

import pytest

from headrace import Caller, NotFound, Operation, Unavailable
from tests.interceptors.on_demand.conftest import MIB, SIZE, Repository, refusal, until

SEQUENCES = """sequence_batching { max_sequence_idle_microseconds: 60000000 control_input { name: "START"
control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }"""


def test_a_model_without_room_beside_the_pinned_ones_is_refused_at_once(repository: Repository) -> None:
    repository.add("pinned", "a")
    repository.add("large", size=4 * SIZE)

    async def scenario() -> None:
        for ask in (repository.infer("large"), repository.server.load("large")):
            error = await asyncio.wait_for(refusal(ask), 5)
            assert "model 'large' cannot be loaded: it needs 256 MiB on host beside the pinned models" in error.message
            assert "(pinned: 64 MiB), and all models together may use 300 MiB (--on-demand-memory)" in error.message
        assert await repository.infer("a") == 2
        assert repository.resident == {"pinned", "a"}

    repository.run(scenario, memory="300MiB", pinned="pinned", wait=30)


def test_a_load_by_name_waits_for_room_no_longer_than_a_request(repository: Repository) -> None:
    repository.add("a", "b")
    repository.probe.executing["a"] = threading.Event()

    async def scenario() -> None:
        await repository.server.load("a")
        busy = asyncio.ensure_future(repository.infer("a"))
        await until(lambda: repository.mode.loads.states["a"].in_flight)
        error = await asyncio.wait_for(refusal(repository.server.load("b")), 5)
        assert isinstance(error, Unavailable)
        assert "has waited 1.5 s for room in the memory of models (--on-demand-wait)" in error.message
        repository.probe.executing["a"].set()
        assert await busy == 2
        await repository.server.unload("a")
        await until(lambda: not repository.resident)
        repository.probe.loading["b"] = threading.Event()
        loading = asyncio.ensure_future(repository.server.load("b"))
        await until(lambda: repository.probe.loads["b"])
        await asyncio.sleep(1.7)  # a started load may take longer
        repository.probe.loading["b"].set()
        await loading

    repository.run(scenario, memory=f"{4 * SIZE // MIB}MiB", wait=1.5, patience=30)


def test_a_load_overtakes_others_only_if_it_does_not_delay_them(repository: Repository) -> None:
    for name, size in (("busy", 150), ("large", 100), ("c", 60), ("small", 10)):
        repository.add(name, size=size * MIB)  # a load is charged 3.5 times as much
    repository.probe.executing["busy"] = threading.Event()

    async def scenario() -> None:
        states = repository.mode.loads.states
        busy = asyncio.ensure_future(repository.infer("busy"))
        await until(lambda: "busy" in repository.resident)
        large = asyncio.ensure_future(repository.infer("large"))
        await until(lambda: states["busy"].eviction)
        assert await asyncio.wait_for(repository.infer("small"), 5) == 2
        c = asyncio.ensure_future(repository.infer("c"))
        await until(lambda: "c" in states and states["c"].waiting)
        await asyncio.sleep(0.15)  # the queue is checked every 0.1 s
        assert not large.done()
        assert "c" not in repository.mode.loads.budget.charges  # it would fit now, but not beside large
        repository.probe.executing["busy"].set()
        assert [await each for each in (busy, large, c)] == [2, 2, 2]
        assert repository.mode.loads.failures == 0

    repository.run(scenario, memory="470MiB", patience=0.05)


def test_a_model_with_sequences_is_not_evicted(repository: Repository) -> None:
    pytest.importorskip("headrace_sequence")
    repository.add("sequences", config=SEQUENCES)
    repository.add("b")

    async def scenario() -> None:
        await repository.server.load("sequences")
        await refusal(repository.infer("b"))
        assert repository.resident == {"sequences"}
        assert "sequences" in repository.mode.loads.open
        repository.mode.loads.states["sequences"].used_ns -= 60_000_000_000
        await repository.server.load("b")
        assert repository.resident == {"b"}

    repository.run(scenario, memory=f"{4 * SIZE // MIB}MiB", wait=0.5, patience=0.05)


def test_a_model_that_was_just_loaded_is_the_most_recently_used(repository: Repository) -> None:
    repository.add("a", "b", "c")

    async def scenario() -> None:
        await repository.infer("a")
        await repository.server.load("b")
        repository.mode.loads.unload_idle()
        assert repository.mode.loads.states["b"].eviction is None
        await repository.infer("c")
        assert repository.resident == {"b", "c"}

    repository.run(scenario, memory=f"{5 * SIZE // MIB}MiB", keep_alive=30)


def test_a_load_ends_if_a_dependency_is_removed(repository: Repository) -> None:
    repository.add("step", "other")
    repository.add_ensemble("both", "step", "other")
    repository.probe.loading["other"] = threading.Event()
    repository.probe.broken["other"] = "no weights here"

    async def scenario() -> None:
        asking = asyncio.ensure_future(refusal(repository.infer("both")))
        await until(lambda: repository.probe.loads["other"])
        repository.mode.loads.states.pop("other")  # as a request does after its removal from the repository
        repository.probe.loading["other"].set()
        assert "no weights here" in (await asyncio.wait_for(asking, 5)).message
        assert repository.mode.loads.states["both"].loading is None

    repository.run(scenario)


def test_a_request_waits_no_longer_than_its_client(repository: Repository) -> None:
    repository.add("a")
    repository.probe.loading["a"] = threading.Event()

    async def scenario() -> None:
        caller = Caller("http", deadline_ns=monotonic_ns() + 200_000_000)
        waiting = repository.mode.admit(caller, Operation.INFER, "a")
        assert isinstance(waiting, Awaitable)
        error = await asyncio.wait_for(refusal(waiting), 10)
        assert error.message == "Request timeout expired while it waited for its load of model 'a'"
        repository.probe.loading["a"].set()

    repository.run(scenario, wait=30)


def test_unknown_names_do_not_list_the_repository_each_time(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.add("a")

    async def scenario() -> None:
        names, listed = repository.mode.models.names, 0

        async def count() -> Collection[str]:
            nonlocal listed
            listed += 1
            return await names()

        monkeypatch.setattr(repository.mode.models, "names", count)
        repository.mode._listed_s -= 1
        for number in range(20):
            assert isinstance(await refusal(repository.infer(f"nope{number}")), NotFound)
        assert listed in (1, 2, 3)  # once a second

    repository.run(scenario)
