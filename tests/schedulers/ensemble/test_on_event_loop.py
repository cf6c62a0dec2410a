"""Ensembles with steps on the event loop: same answers, statistics and failures as on threads."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from typing import Any

import numpy as np
import pytest

from headrace import Server
from headrace_testing.serving import on_loop

from .conftest import Write, ensemble, identity, step

ROWS = [np.array([[number, -number]], np.float32) for number in range(40)]


def looped(event_loop: str, count: int = 1) -> str:
    """Return an identity model with this number of instances. It batches the requests of one turn of the loop."""
    return (
        identity()
        + f'parameters {{ key: "event_loop" value {{ string_value: "{event_loop}" }} }} dynamic_batching {{ }} '
        + f"instance_group {{ kind: KIND_CPU count: {count} }}"
    )


#: Three steps in a row, and one in parallel.
STEPS = [step("one", "a=x", "b=u"), step("two", "a=u", "b=v"), step("three", "a=v", "b=y"), step("side", "a=x", "b=z")]
ON_LOOP = re.compile(r'^nv_model_instances_on_event_loop{model="(\w+)",version="1"} (\S+)$', re.MULTILINE)


def on_event_loop(server: Server) -> dict[str, float]:
    """Return the number of instances of each model on the event loop, from the metrics page."""
    (metrics,) = (frontend for frontend in server.frontends if frontend.name == "metrics")
    port = metrics.port  # type: ignore[attr-defined]  # the frontend's own
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=90) as page:
        return {name: float(count) for name, count in ON_LOOP.findall(page.read().decode())}


@pytest.mark.parametrize("event_loop", ["on", "off"])
def test_steps_on_the_loop_answer_and_count_as_on_threads(event_loop: str, write: Write, run: Any) -> None:
    for name in ("one", "two", "three", "side"):
        write(name, looped(event_loop))
    write("e", ensemble(STEPS, outputs="y z"))
    server: Server = run(metrics_address="127.0.0.1", metrics_port=0, allow_http=False, allow_grpc=False)
    on_loop(server, server.start_frontends())

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(server.infer_async("e", {"x": row}) for row in ROWS))

    for row, answer in zip(ROWS, on_loop(server, ask_all()), strict=True):
        np.testing.assert_array_equal(np.asarray(answer.outputs["y"]), row)
        np.testing.assert_array_equal(np.asarray(answer.outputs["z"]), row)
    snapshots = {name: server.served(name)[0].snapshot() for name in ("e", "one", "two", "three", "side")}
    assert {snapshot.success.count for snapshot in snapshots.values()} == {len(ROWS)}
    assert {snapshot.pending for snapshot in snapshots.values()} == {0}
    expected = {name: float(event_loop == "on") for name in ("one", "two", "three", "side")}
    assert {name: count for name, count in on_event_loop(server).items() if name != "e"} == expected
    if event_loop == "on":  # the requests of one turn are one batch, up to 8 rows
        assert [server.served(name)[0].snapshot().executions.execution_count for name in ("one", "side")] == [5, 5]


def test_loads_and_unloads_of_steps_lose_no_request(write: Write, run: Any) -> None:
    for name in ("one", "two", "three", "side"):
        write(name, looped("on"))
    write("e", ensemble(STEPS, outputs="y z"))
    server: Server = run(model_control_mode="explicit", load_model=("e",))

    async def scenario() -> None:
        for number, change in enumerate(
            [looped("on", 3), looped("off"), looped("on", 2), looped("auto"), looped("on")]
        ):
            answers = [asyncio.ensure_future(server.infer_async("e", {"x": row})) for row in ROWS]
            for name in ("one", "three"):
                write(name, change)
                await server.load(name)
            for row, answer in zip(ROWS, await asyncio.gather(*answers), strict=True):
                np.testing.assert_array_equal(np.asarray(answer.outputs["y"]), row)
            where = server.explain("one")["runs_on"]
            assert len(where) == (3, 1, 2, 1, 1)[number]
        answers = [asyncio.ensure_future(server.infer_async("e", {"x": row})) for row in ROWS]
        await asyncio.sleep(0)
        await server.unload("e", unload_dependents=True)
        assert len(await asyncio.gather(*answers)) == len(ROWS)
        for name in ("one", "three"):  # the requested ones
            await server.unload(name)
        assert server.served() == []

    on_loop(server, scenario())
