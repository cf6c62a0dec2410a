"""Frontend processes of a server in this process: one that answers no more is killed and replaced, others go on."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from headrace.frontends.processes.frontend import FrontendProcesses
from headrace.frontends.processes.process import SILENT_S, FrontendProcess
from headrace.ipc.framing import frame
from headrace.server import Server
from headrace.supervision.heartbeat import DelayedCall
from headrace.supervision.supervised_process import LifeKind
from headrace_testing.played import TurnedClock

CONFIG = (
    'backend: "identity" input { name: "IN" data_type: TYPE_FP32 dims: [-1] } '
    'output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }'
)
#: Ends only what hangs.
HANGING_S = 90


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "echo/1").mkdir(parents=True)
    (tmp_path / "echo/config.pbtxt").write_text(CONFIG)
    return tmp_path


def pid_of(process: FrontendProcess) -> int:
    assert process._launched is not None
    return process._launched.process.pid


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


def test_what_is_said_to_one_that_has_hung_up_and_not_yet_ended_is_dropped(models: Path) -> None:
    async def main() -> None:
        async with Server(models, frontend_processes=1, http_port=0, allow_grpc=False) as server:
            frontend = FrontendProcesses(server.engine)
            await frontend.start()
            try:
                assert frontend._processes is not None
                (process,) = frontend._processes.processes
                assert process._transport is not None
                process._transport.abort()
                while process.is_connected:
                    process.send(frame(LifeKind.ASK, 0))
                    await asyncio.sleep(0)
            finally:
                await frontend.stop()

    loop = uvloop.new_event_loop()  # asyncio's own takes it without a word
    try:
        loop.run_until_complete(asyncio.wait_for(main(), HANGING_S))
    finally:
        loop.close()


def test_one_that_is_stopped_is_killed_in_its_time_and_replaced_and_the_other_is_left_alone(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = TurnedClock()

    def call_later(process: FrontendProcess, delay_s: float, call: Callable[[], None]) -> DelayedCall:
        return clock.call_later(int(delay_s * 1e9), call)

    monkeypatch.setattr(FrontendProcess, "call_later", call_later)

    async def main() -> None:
        options = {"frontend_processes": 2, "http_port": 0, "grpc_port": 0, "allow_grpc": False}
        async with Server(models, **options) as server:
            frontend = FrontendProcesses(server.engine)
            await frontend.start()
            try:
                await stop_one(frontend)
            finally:
                await frontend.stop()

    async def beat(of: list[FrontendProcess]) -> None:
        """A second, in which those answer ``of`` whom it is wanted."""
        clock.turn(10**9)
        for process in of:
            assert process._heartbeat is not None
            await until(lambda heart=process._heartbeat: not heart.is_asked)  # type: ignore[misc]

    async def stop_one(frontend: FrontendProcesses) -> None:
        assert frontend._processes is not None
        stopped, other = frontend._processes.processes
        for _ in range(2 * SILENT_S):
            await beat([stopped, other])
        os.kill(pid_of(stopped), signal.SIGSTOP)
        for _ in range(SILENT_S):
            await beat([other])
            assert not stopped.is_dead
        clock.turn(10**9)
        await stopped.ended.wait()
        assert stopped.reason == f"frontend process 0 has not answered for {SILENT_S} s and was killed"
        processes = frontend._processes.processes
        await until(lambda: processes[0] is not stopped and processes[0].has_started)
        assert processes[1] is other
        for _ in range(SILENT_S + 1):
            await beat(processes)
        assert not any(process.is_dead for process in processes)

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(main(), HANGING_S))
    assert "has not answered for 30 s and was killed; its connections are lost" in caplog.text
    assert "frontend process 0 has been restarted" in caplog.text
