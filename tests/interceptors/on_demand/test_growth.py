"""Models that are larger than their charge. The test sets their memory in the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

import pytest

from tests.interceptors.on_demand.conftest import MIB, SIZE, Repository, refusal, until


def occupy(repository: Repository, monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """Let each loaded model occupy ``mib`` from now on."""

    def shares(file_bytes: Mapping[str, int]) -> dict[str, int]:
        return dict.fromkeys(file_bytes, mib * MIB)

    monkeypatch.setattr(repository.mode.loads.server, "shares", shares)


def test_a_load_that_turns_out_too_large_is_undone(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.add("a")

    async def scenario() -> None:
        occupy(repository, monkeypatch, 400)
        error = await refusal(repository.infer("a"))
        assert "model 'a' was loaded and is unloaded again: it needs 400 MiB on host, and all models" in error.message
        await until(lambda: not repository.resident)
        repository.mode.loads.states["a"].failed = None
        assert "model 'a' cannot be loaded: it needs 400 MiB" in (await refusal(repository.infer("a"))).message
        assert repository.probe.loads["a"] == 1

    repository.run(scenario, memory=f"{5 * SIZE // MIB}MiB")


def test_only_idle_models_are_evicted_after_growth(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.add("pinned", "a", "b")
    repository.probe.executing["a"] = threading.Event()

    async def scenario() -> None:
        states = repository.mode.loads.states
        busy = asyncio.ensure_future(repository.infer("a"))
        await until(lambda: "a" in states and states["a"].in_flight)
        await repository.infer("b")
        occupy(repository, monkeypatch, 200)
        for _ in range(2):
            await repository.mode.loads.measure()
            await until(lambda: repository.resident == {"pinned", "a"})
        assert "a" in repository.mode.loads.open
        repository.probe.executing["a"].set()
        assert await busy == 2
        await repository.mode.loads.measure()
        await until(lambda: repository.resident == {"pinned"})

    repository.run(scenario, memory="390MiB", pinned="pinned")
