"""Loads of ensembles: after their models, again after a change of these, and not without them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import HeadraceError, Server
from headrace_testing.serving import on_loop

from .conftest import EXPLICIT, LENIENT, Write, both, ensemble, identity, step

Run = Callable[..., Server]
ROW = np.array([[1, 2]], np.float32)
DEADLINE_S = 90.0


def states(server: Server) -> dict[str, str]:
    return {entry.name: entry.state for entry in server.index()}


def why(server: Server, name: str) -> str:
    return next(entry.reason for entry in server.index() if entry.name == name)


def until(server: Server, claim: Callable[[], bool]) -> None:
    """Wait until ``claim`` holds."""

    async def check() -> None:
        while not claim():
            await asyncio.sleep(0)

    on_loop(server, asyncio.wait_for(check(), DEADLINE_S))


def delayed(by_ms: int) -> str:
    return f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{by_ms}" }} }}'


def chain(*models: str) -> str:
    """An ensemble of identity models one behind the other."""
    names = ["x", *(f"t{number}" for number in range(len(models) - 1)), "y"]
    return ensemble([step(model, f"a={names[n]}", f"b={names[n + 1]}") for n, model in enumerate(models)])


def test_a_failed_load_by_name_has_the_error_of_triton(write: Write, run: Run) -> None:
    write("one", identity())
    write("e", ensemble([step("one", "a=x", "b=y")], datatype="INT32"))
    write("lost", chain("gone"))
    server = run(**EXPLICIT)
    for name, reason in (
        ("lost", "ensemble lost contains models that are not available or ambiguous: gone\n"),
        ("e", "in ensemble e, ensemble tensor x: inconsistent data type: TYPE_INT32 is inferred from model e while "),
    ):
        with pytest.raises(HeadraceError) as refusal:
            on_loop(server, server.load(name))
        assert refusal.value.message.startswith(f"load failed for model '{name}': {reason}")


@pytest.mark.parametrize("threads", [1, 4])
def test_models_are_loaded_before_the_ensembles_that_need_them_however_deep(
    threads: int, write: Write, run: Run
) -> None:
    write("z", ensemble([step("zz", "a=x", "b=y")]))
    write("zz", identity())
    write("b_inner", ensemble([step("z", "x=x", "y=m"), step("zz", "a=m", "b=y")]))
    write("a_outer", ensemble([step("b_inner", "x=x", "y=m"), step("z", "x=m", "y=y")]))
    server = run(model_load_thread_count=threads)
    assert set(states(server).values()) == {"READY"}
    np.testing.assert_array_equal(np.asarray(server.infer("a_outer", {"x": ROW}).outputs["y"]), ROW)


def test_a_load_by_name_loads_the_steps_of_the_ensemble(write: Write, run: Run) -> None:
    write("one", identity())
    write("inner", chain("one"))
    write("e", ensemble([step("inner", "x=x", "y=y")]))
    server = run(**EXPLICIT)
    on_loop(server, server.load("e"))
    assert states(server) == dict.fromkeys(("e", "inner", "one"), "READY")
    server.infer("e", {"x": ROW})


def test_models_of_only_this_ensemble_are_unloaded_with_it_on_request(write: Write, run: Run) -> None:
    for name in ("one", "two", "three"):
        write(name, identity())
    write("inner", chain("one", "three"))
    write("e", ensemble([step("inner", "x=x", "y=m"), step("two", "a=m", "b=y")]))
    write("f", chain("three"))
    server = run(load_model=("two",), **EXPLICIT)
    for name in ("e", "f"):
        on_loop(server, server.load(name))
    on_loop(server, server.unload("e", unload_dependents=True))
    assert {name for name in states(server) if server.ready_versions(name)} == {"two", "three", "f"}
    on_loop(server, server.unload("f"))
    assert {name for name in states(server) if server.ready_versions(name)} == {"two", "three"}


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ({}, "ensemble e contains models that are not available or ambiguous: one, two"),
        (
            {"one": identity(), "two": 'backend: "nobody" ' + identity()[20:]},
            "ensemble 'e' depends on 'two' which has no loaded version. Model 'two' loading failed with error: ",
        ),
        (
            {"one": chain("e"), "two": identity()},
            "circular dependency between ensembles: e -> ... -> one -> e",
        ),
    ],
)
def test_an_ensemble_is_refused_with_its_missing_models(
    models: dict[str, str], reason: str, write: Write, run: Run
) -> None:
    write("e", chain("one", "two"))
    for name, config in models.items():
        write(name, config)
    server = run(**LENIENT)
    assert reason in why(server, "e")
    assert not server.ready_versions("e")


def test_an_ensemble_with_a_cache_and_a_decoupled_step_is_refused(write: Write, run: Run) -> None:
    """In the words of Triton 2.51."""
    cached = "response_cache { enable: true }"
    write("many", identity() + "model_transaction_policy { decoupled: true }")
    write("plain", ensemble([step("many", "a=x", "b=y")]))
    for name, steps in (("e", step("many", "a=x", "b=y")), ("outer", step("plain", "x=x", "y=y"))):
        write(name, ensemble([steps], more=cached))
    write("above", ensemble([step("e", "x=x", "y=y")]))
    write("one", identity())
    write("fine", ensemble([step("one", "a=x", "b=y")], more=cached))
    server = run(**LENIENT)
    refused = (
        "Response Cache does not currently support model {} with 'decoupled' transaction policy. Please disable the "
        "response cache."
    )
    for name in ("e", "outer"):
        assert why(server, name) == f"Invalid argument: {refused.format(name)}"
    assert why(server, "above").endswith(
        "ensemble 'above' depends on 'e' which has no loaded version. Model 'e' loading failed with error: version 1 "
        f"is at UNAVAILABLE state: Invalid argument: {refused.format('e')};"
    )
    assert server.ready_versions("plain") == server.ready_versions("fine") == [1]


def test_a_required_version_that_is_not_loaded_is_named(write: Write, run: Run) -> None:
    write("one", identity(), versions=(1, 3))
    write("e", ensemble([step("one", "a=x", "b=y", version=1)]))
    write("good", ensemble([step("one", "a=x", "b=y", version=3)]))
    server = run(**LENIENT)
    assert "ensemble 'e' depends on 'one' whose required version 1 is not loaded." in why(server, "e")
    server.infer("good", {"x": ROW})


INITIALIZE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        {0}

    def execute(self, requests):
        raise AssertionError("no call is expected")
"""
IN_THREAD = 'parameters { key: "isolation" value { string_value: "thread" } }'


def python(write: Write, name: str, initialize: str) -> None:
    """Return a Python model with the code of ``initialize``."""
    config = f'backend: "python" max_batch_size: 8 {both("a", "b")}{IN_THREAD}'
    write(name, config, files={"1/model.py": INITIALIZE.format(initialize)})


@pytest.mark.parametrize("unloaded", ["one", "inner"])
def test_an_unload_of_a_step_waits_for_loads_of_its_ensembles(
    unloaded: str, write: Write, run: Run, tmp_path: Path
) -> None:
    """As in Triton 2.51: the load succeeds, then the step is unloaded, and the ensemble with it."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    write("one", identity())
    write("inner", chain("one"))
    python(write, "slow", f"__import__('pathlib').Path({str(gate)!r}).read_text()")
    write("e", ensemble([step("inner", "x=x", "y=m"), step("slow", "a=m", "b=y")]))
    server = run(**EXPLICIT)

    async def scene() -> None:
        load = asyncio.ensure_future(server.load("e"))
        try:
            while not server.ready_versions("inner"):
                await asyncio.sleep(0)
            unload = asyncio.ensure_future(server.unload(unloaded))
            await server.load("one")  # after an unload that does not wait
            assert not unload.done()
            assert server.ready_versions(unloaded)
        finally:
            await asyncio.to_thread(gate.write_text, "")
        await load
        await unload
        while server.ready_versions("e"):
            await asyncio.sleep(0)

    on_loop(server, asyncio.wait_for(scene(), DEADLINE_S))
    assert states(server)[unloaded] != "READY"
    assert states(server)["slow"] == "READY"


def test_a_step_that_unloads_another_does_not_deadlock(write: Write, run: Run) -> None:
    write("one", identity())
    python(write, "asks", "pb_utils.unload_model('one')")
    write("e", ensemble([step("one", "a=x", "b=m"), step("asks", "a=m", "b=y")]))
    server = run(**EXPLICIT)
    on_loop(server, server.load("one"))
    with pytest.raises(HeadraceError, match="depends on 'one' which has no loaded version"):
        on_loop(server, asyncio.wait_for(server.load("e"), DEADLINE_S))


def test_an_ensemble_follows_loads_and_unloads_of_its_models(write: Write, run: Run) -> None:
    write("one", identity())
    write("e", chain("one"))
    server = run(load_model=("*",), **EXPLICIT)
    on_loop(server, server.unload("one"))
    until(server, lambda: not server.ready_versions("e"))
    with pytest.raises(HeadraceError, match="Request for unknown model: 'e'"):
        server.infer("e", {"x": ROW})
    on_loop(server, server.load("one"))
    until(server, lambda: bool(server.ready_versions("e")))
    server.infer("e", {"x": ROW})
    on_loop(server, server.unload("e"))
    on_loop(server, server.unload("one"))
    on_loop(server, server.load("one"))
    assert not server.ready_versions("e"), "who was unloaded by name does not come back by itself"


def test_a_reload_of_a_step_loses_no_request_of_the_ensemble(write: Write, run: Run) -> None:
    write("slow", identity() + delayed(5))
    write("one", identity())
    write("e", chain("slow", "one"))
    server = run(load_model=("*",), **EXPLICIT)
    first = server.served("one")[0]

    async def scenario() -> list[Any]:
        responses = [asyncio.ensure_future(server.infer_async("e", {"x": ROW})) for _ in range(20)]
        for number in range(3):
            await asyncio.to_thread(write, "one", identity() + delayed(number))
            await server.load("one")
            responses += [asyncio.ensure_future(server.infer_async("e", {"x": ROW})) for _ in range(20)]
        return await asyncio.gather(*responses)

    assert len(on_loop(server, scenario())) == 80
    assert server.served("one")[0] is not first
    until(server, lambda: set(server.served("one")) < set(server.served("e")[0].others))


def test_a_stopping_server_answers_requests_of_ensembles(write: Write, run: Run) -> None:
    write("slow", identity() + delayed(20))
    write("one", identity())
    answers = []
    with Server(write("e", chain("slow", "one", "slow")).parent) as server:

        async def ask() -> None:
            answers.append(await server.infer_async("e", {"x": ROW}))

        asyncio.run_coroutine_threadsafe(ask(), server.loop)
        until(server, lambda: server.served("slow")[0].model_queue.in_flight > 0)
    assert len(answers) == 1


def test_a_refused_ensemble_is_retried_only_after_a_change_of_its_models(
    write: Write, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two", "three"):
        write(name, identity(dims="3" if name == "three" else "2"))
    write("e", chain("one", "two", "three"))
    server = run(load_model=("*",), **EXPLICIT)
    assert "inconsistent shape" in why(server, "e")
    on_loop(server, server._lifecycle.background.settle())
    assert sum("failed to load 'e'" in record.getMessage() for record in caplog.records) == 1
    write("three", identity())
    on_loop(server, server.load("three"))
    until(server, lambda: bool(server.ready_versions("e")))
    write("three", identity(dims="3"))
    on_loop(server, server.load("three"))
    until(server, lambda: not server.ready_versions("e"))
    assert server.ready_versions("three"), "a model is not kept from changing by what needs it"


def test_ten_reloads_under_load_lose_no_request_and_no_memory(write: Write, run: Run) -> None:
    write("one", identity())
    write("inner", chain("one", "one"))
    write("e", ensemble([step("inner", "x=x", "y=y")]))
    server = run(load_model=("*",), **EXPLICIT)

    async def ask(stop: asyncio.Event) -> int:
        count = 0
        while not stop.is_set():
            await server.infer_async("e", {"x": ROW})
            count += 1
        return count

    async def scenario() -> list[int]:
        stop = asyncio.Event()
        asking = [asyncio.ensure_future(ask(stop)) for _ in range(8)]
        for number in range(10):
            await asyncio.to_thread(write, "one", identity() + delayed(number % 2))
            await server.load("one")
        stop.set()
        return await asyncio.gather(*asking)

    assert min(on_loop(server, scenario())) > 0
    until(server, lambda: not server._lifecycle.background.is_busy)
    assert not server._lifecycle._draining


def test_a_stopping_server_reloads_no_ensemble(write: Write, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Its steps go one after the other, and each is something that the ensemble needs."""
    write("one", identity())
    write("two", identity())
    write("e", chain("one", "two"))
    server = run()
    on_loop(server, server.stop())
    assert states(server) == dict.fromkeys(("e", "one", "two"), "UNAVAILABLE")
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
