"""Real processes that serve nothing: they receive their settings, start, exit when drained, and are replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from headrace.errors import HeadraceError, InternalError
from headrace_processes.ipc.framing import Frame
from headrace_processes.supervision.exits import RestartPolicy
from headrace_processes.supervision.process_set import ProcessSet
from headrace_processes.supervision.supervised_process import LaunchedProcess, LifeKind, SupervisedProcess, launch

CHILD = """
import asyncio, select, socket, uvloop
from headrace_processes.ipc.json_parts import json_frame
from headrace_processes.supervision.parent_channel import ParentChannel, run
from headrace_processes.supervision.supervised_process import LifeKind

def serve(*, channel, crash_file):
    run(lambda: linger(uvloop.run(main(channel))), channel, crash_file)

def linger(status):
    if status == 2:  # longer than a process may run that has closed its channel
        select.select([], [], [], 1)
    return status

async def main(channel):
    line = ParentChannel()
    await line.connect(socket.socket(fileno=channel))
    told = await line.settings
    if told["deed"] == "raise":
        raise ValueError("what it was told")
    if told["deed"] == "fail":
        line.send(json_frame(LifeKind.FAILED, {"code": "Unavailable", "message": "no port"}))
    elif told["deed"] != "wait":
        line.send(json_frame(LifeKind.STARTED, {}))
    await line.draining.wait()
    return told["status"]
"""


class Idle(SupervisedProcess):
    """A process that does ``deed`` at its start, and exits with ``status``."""

    def __init__(self, number: int, deed: str = "", status: int = 0) -> None:
        super().__init__(f"idle {number}")
        self._deed, self._status = deed, status

    def launch(self) -> LaunchedProcess:
        launched = launch(self.name, "headrace_idle:serve", {})
        self.pid = launched.process.pid
        return launched

    def settings(self) -> Mapping[str, Any]:
        return {"deed": self._deed, "status": self._status}


class Unlaunched(Idle):
    """A process that cannot be launched: the system has no descriptor left."""

    def launch(self) -> LaunchedProcess:
        raise OSError(24, "Too many open files")


@pytest.fixture(autouse=True)
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "headrace_idle.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(RestartPolicy, "delay_s", 0.0)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 90))


@asynccontextmanager
async def kept(processes: ProcessSet[Idle]) -> AsyncIterator[None]:
    async with anyio.create_task_group() as keeping:
        keeping.start_soon(processes.keep)
        yield
        keeping.cancel_scope.cancel()


def test_drained_processes_exit_with_the_status_that_they_return() -> None:
    async def scenario() -> None:
        processes = ProcessSet(2, lambda number: Idle(number, status=number))
        await processes.start()
        assert [process.has_started for process in processes.processes] == [True, True]
        async with kept(processes):
            pass
        await processes.drain()
        assert [process.exit_code for process in processes.processes] == [0, 1]
        assert [process.has_started for process in processes.processes] == [False, False]

    run(scenario())


def test_one_that_takes_its_time_to_end_is_not_killed_for_it() -> None:
    async def scenario() -> None:
        processes = ProcessSet(1, lambda number: Idle(number, status=2))
        await processes.start()
        await processes.drain()
        assert [(process.exit_code, process.reason) for process in processes.processes] == [
            (2, "idle 0 exited with status 2")
        ]

    run(scenario())


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: Idle(0, "raise"), InternalError, "ValueError: what it was told"),
        (lambda: Idle(0, "fail"), HeadraceError, "^no port$"),
        (lambda: Unlaunched(0), OSError, "Too many open files"),
    ],
    ids=["raises", "fails", "is-not-launched"],
)
def test_a_process_that_cannot_start_has_a_reason(make: Callable[[], Idle], kind: type[Exception], text: str) -> None:
    async def scenario() -> None:
        process = make()
        with pytest.raises(kind, match=text):
            await process.start()
        process.kill("was not needed")
        await process.ended.wait()

    run(scenario())


def test_one_that_dies_is_followed_by_another_even_if_that_fails_at_first(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        kinds = iter((Idle, Unlaunched, Idle))

        def make(number: int) -> Idle:
            kind = next(kinds, None)
            if kind is None:
                raise AssertionError("one too many")
            return kind(number)

        processes = ProcessSet(1, make)
        await processes.start()
        async with kept(processes):
            (first,) = processes.processes
            os.kill(first.pid, signal.SIGKILL)
            await first.ended.wait()
            while not (processes.processes[0] is not first and processes.processes[0].has_started):
                await asyncio.sleep(0.01)
        await processes.drain()
        processes.end()

    run(scenario())
    lines = [record.getMessage() for record in caplog.records if "idle 0" in record.getMessage()]
    assert lines == [
        "idle 0 was killed by SIGKILL; its connections are lost",
        "idle 0 could not be restarted: OSError: [Errno 24] Too many open files",
        "idle 0 could not be launched: OSError: [Errno 24] Too many open files; its connections are lost",
        "idle 0 has been restarted",
    ]


@pytest.mark.parametrize("turns", range(4))
def test_one_that_has_just_started_when_all_are_to_end_is_not_replaced(
    turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A cancellation must not be lost in the turn in which the awaited event is set."""

    async def scenario() -> None:
        has_restarted = asyncio.Event()
        made = []

        class Hasty(Idle):
            def receive(self, message: Frame) -> None:
                super().receive(message)
                if message.kind == LifeKind.STARTED:
                    has_restarted.set()

        def make(number: int) -> Idle:
            made.append(number)
            return (Idle, Hasty)[len(made) > 1](number)

        processes = ProcessSet(1, make)
        await processes.start()
        async with kept(processes):
            (first,) = processes.processes
            os.kill(first.pid, signal.SIGKILL)
            await has_restarted.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
        await processes.drain()
        assert processes.processes[0].exit_code == 0
        assert made == [0, 0]

    run(scenario())
    lost = [record.getMessage() for record in caplog.records if "connections are lost" in record.getMessage()]
    assert lost == ["idle 0 was killed by SIGKILL; its connections are lost"]


def test_processes_that_were_never_started_end_at_once() -> None:
    async def scenario() -> None:
        processes = ProcessSet(2, Idle)
        await processes.drain()
        assert [process.reason for process in processes.processes] == [
            f"idle {n} was not needed any more" for n in (0, 1)
        ]

    run(scenario())


def test_one_that_dies_again_is_followed_after_the_delay_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first exit is followed at once, the next one only after its delay, an hour here."""
    made: list[int] = []
    started = asyncio.Event()

    def delay_s(policy: RestartPolicy) -> float:
        if len(made) == 1:
            return 0.0
        started.set()
        return 3600.0

    monkeypatch.setattr(RestartPolicy, "delay_s", property(delay_s))

    def make(number: int) -> Idle:
        made.append(number)
        return Idle(number)

    async def scenario() -> None:
        processes = ProcessSet(1, make)
        await processes.start()
        async with kept(processes):
            for count in (1, 2):
                while not (len(made) == count and processes.processes[0].has_started):
                    await asyncio.sleep(0.01)
                os.kill(processes.processes[0].pid, signal.SIGKILL)
            await started.wait()
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(made) == 2
        processes.end()

    run(scenario())


def test_a_process_that_is_being_launched_when_all_are_to_end_is_killed() -> None:
    launching, may_go_on = threading.Event(), threading.Event()

    class Slow(Idle):
        def launch(self) -> LaunchedProcess:
            launching.set()
            assert may_go_on.wait(60)
            return super().launch()

    async def scenario() -> None:
        processes = ProcessSet(1, Slow)
        async with anyio.create_task_group() as starting:
            starting.start_soon(processes.start)
            await asyncio.to_thread(launching.wait, 60)
            starting.cancel_scope.cancel()
            may_go_on.set()
        await processes.drain()
        (process,) = processes.processes
        assert (process.exit_code, process.reason) == (-signal.SIGKILL, "idle 0 was not needed any more")
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)

    run(scenario())


def test_the_first_that_cannot_start_ends_the_start_of_the_others() -> None:
    async def scenario() -> None:
        processes = ProcessSet(2, lambda number: (Idle(0, "fail"), Idle(1, "wait"))[number])
        with pytest.raises(HeadraceError, match=r"^no port$"):
            await processes.start()
        assert not processes.processes[1].has_started
        await processes.drain()
        assert processes.processes[1].exit_code == 0

    run(scenario())
