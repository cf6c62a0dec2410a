"""Ensembles in a polled repository, by mode poll and by ``--dev``: models change, break, disappear and return."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace import HeadraceError, Server
from headrace.models.control import Watcher
from tests.core.conftest import local_repositories

from .conftest import LENIENT, Write, ensemble, identity, step

ROW = np.array([[1, 2]], np.float32)
DEADLINE_S = 90.0
CHAIN = ensemble([step("one", "a=x", "b=m"), step("two", "a=m", "b=y")])
#: The interval between two polls of the repository.
INTERVAL_S = 0.01


@asynccontextmanager
async def watched(repository: Path, dev: bool) -> AsyncIterator[Server]:
    """Yield a server on this loop that polls its repository 100 times per second."""
    async with Server(repository, **LENIENT) as server:
        watcher = Watcher(local_repositories(repository), server._lifecycle, INTERVAL_S, dev=dev, known_only=False)
        await watcher.prepare()
        watcher.start()
        try:
            yield server
        finally:
            watcher.stop()


async def until(claim: Callable[[], bool]) -> None:
    while not claim():
        await asyncio.sleep(INTERVAL_S)


def asks(server: Server, name: str, other: str) -> bool:
    """Return True if the served version of ``name`` calls the served version of ``other``."""
    return any(set(server.served(other)) & set(model.others) for model in server.served(name))


def why(server: Server, name: str) -> str:
    return next((entry.reason for entry in server.index() if entry.name == name), "")


@pytest.mark.parametrize("dev", [False, True], ids=["poll", "dev"])
def test_an_ensemble_follows_changes_of_its_models_and_others_do_not(
    write: Write, headrace_repository: Path, dev: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two", "free"):
        write(name, identity())
    write("e", CHAIN)
    write("outer", ensemble([step("e", "x=x", "y=y")]))

    async def answers(server: Server) -> bool:
        try:
            answer = await server.infer_async("outer", {"x": ROW})
        except HeadraceError:
            return False
        np.testing.assert_array_equal(np.asarray(answer.outputs["y"]), ROW)
        return True

    async def scenario() -> None:
        async with watched(headrace_repository, dev) as server:
            assert await answers(server)
            free, before = server.served("free")[0], server.served("e")[0]

            # Changed: loaded again, with its dependents.
            write("two", identity() + 'parameters { key: "k" value { string_value: "v" } }')
            await until(lambda: before not in server.served("e") and asks(server, "e", "two"))
            await until(lambda: asks(server, "outer", "e"))
            assert await answers(server)

            # Broken: the running version stays.
            write("two", identity(datatype="FP99"))
            await until(lambda: any("FP99" in record.getMessage() for record in caplog.records))
            assert await answers(server)

            # Removed: what needs it is not there any more.
            await asyncio.to_thread(shutil.rmtree, headrace_repository / "two")
            await until(lambda: not server.ready_versions("outer"))
            assert not await answers(server)
            assert await server.infer_async("free", {"a": ROW})

            # Back, and other than the ensemble draws it: refused. Then as it was.
            write("two", identity(dims="3"))
            await until(lambda: "inconsistent shape" in why(server, "e"))
            write("two", identity())
            await until(lambda: bool(server.ready_versions("outer")))
            assert await answers(server)

            # The ensemble itself.
            write("e", ensemble([step("one", "a=x", "b=y")]))
            await until(lambda: asks(server, "e", "one") and not asks(server, "e", "two"))
            await until(lambda: asks(server, "outer", "e"))
            assert await answers(server)
            assert server.served("free") == [free]

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
