"""A thread that expects a message polls for it: for a short time, and rarely if polling has failed lately."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from time import sleep
from typing import Any, NoReturn

import pytest

from headrace_processes.ipc import busy_poll
from headrace_processes.ipc.busy_poll import MAX_SLEEPS, BusyPoller, LoopBusyPoller
from headrace_processes.ipc.channel import FramedSocket
from headrace_processes.ipc.framing import Kind, integers_frame, read_integers


class Clock:
    """A clock that advances only when somebody polls."""

    def __init__(self) -> None:
        self.us = 1000.0
        self.polls = 0

    def poll(self) -> None:
        self.polls += 1
        self.us += 10

    def monotonic_ns(self) -> int:
        return int(self.us * 1000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock: each poll takes 10 microseconds."""
    clock = Clock()
    monkeypatch.setattr(busy_poll, "monotonic_ns", clock.monotonic_ns)
    monkeypatch.setattr(os, "sched_yield", clock.poll)
    return clock


def wait_in_vain(poller: BusyPoller) -> bool:
    """Poll until the limit. Return True if it polled at all."""
    if not poller.begin():
        return False
    while poller.may_repeat():
        pass
    return True


def wait_well(poller: BusyPoller) -> bool:
    began = poller.begin()
    if began:
        poller.succeed()
    return began


# ---------------------------------------------------------------------- how long


def test_a_wait_polls_up_to_its_limit(clock: Clock) -> None:
    began = clock.us
    assert wait_in_vain(BusyPoller(300))
    assert clock.us - began == 300


def test_each_wait_in_vain_is_followed_by_more_that_are_slept_through(clock: Clock) -> None:
    poller = BusyPoller(300)
    awake_at = [number for number in range(1000) if wait_in_vain(poller)]
    slept = [later - earlier - 1 for earlier, later in pairwise(awake_at)]
    assert slept[:7] == [1, 3, 7, 15, 31, 63, 63]
    assert set(slept[6:]) == {MAX_SLEEPS}


def test_message_in_time_restores_polling(clock: Clock) -> None:
    poller = BusyPoller(300)
    for _ in range(500):
        wait_in_vain(poller)
    tries = [wait_well(poller) for _ in range(500)]
    assert all(tries[-400:])
    assert wait_in_vain(poller)
    assert [wait_well(poller) for _ in range(3)] == [False, True, True]  # as if it were the first


def test_with_no_time_it_never_begins(clock: Clock) -> None:
    assert not any(wait_in_vain(BusyPoller(0)) for _ in range(100))
    assert not clock.polls


# ---------------------------------------------------------------------- a socket


def disconnected() -> NoReturn:
    raise AssertionError("the server's end is open")


@pytest.fixture
def open_line() -> Iterator[Callable[[int], tuple[FramedSocket, socket.socket]]]:
    """Return a socket that polls for ``busy_poll_us``, and the server's end."""
    opened: list[socket.socket] = []

    def open_line(busy_poll_us: int) -> tuple[FramedSocket, socket.socket]:
        ours, theirs = socket.socketpair()
        line = FramedSocket(ours.detach(), disconnected, busy_poll_us)
        opened.extend((line._socket, theirs))
        return line, theirs

    yield open_line
    for end in opened:
        end.close()


def numbers(line: FramedSocket, count: int) -> list[int]:
    frames = line.frames()
    return [number for _ in range(count) for number in read_integers(next(frames))]


@pytest.mark.parametrize("busy_poll_us", [0, 300, 1_000_000])
def test_a_message_is_received_whole_before_during_and_after_the_wait(open_line: Any, busy_poll_us: int) -> None:
    line, server = open_line(busy_poll_us)
    first, second, third = (integers_frame(Kind.RELEASE, [number]) for number in (1, 2, 3))
    server.send(first)

    def send() -> None:
        sleep(0.01)
        server.send(second[:5])
        sleep(0.01)
        server.send(second[5:] + third)

    sending = threading.Thread(target=send)
    sending.start()
    assert numbers(line, 3) == [1, 2, 3]
    sending.join()


def test_only_a_socket_with_a_reply_due_polls(open_line: Any, clock: Clock) -> None:
    line, server = open_line(300)
    line.is_reply_due = False
    server.send(integers_frame(Kind.RELEASE, [1]))
    assert numbers(line, 1) == [1]
    sending = threading.Timer(0.05, server.send, (integers_frame(Kind.RELEASE, [2]),))
    sending.start()
    assert numbers(line, 1) == [2]
    assert clock.polls == 0
    line.is_reply_due = True
    sending = threading.Timer(0.05, server.send, (integers_frame(Kind.RELEASE, [3]),))
    sending.start()
    assert numbers(line, 1) == [3]
    assert clock.polls == 30  # of 10 µs each, then it slept


# ---------------------------------------------------------------------- the event loop


class Selector(selectors.DefaultSelector):
    """Records the timeout of each select of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float | None] = []

    def select(self, timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        return super().select(timeout)


def watch(scenario: Callable[[], Any]) -> list[float | None]:
    """Run ``scenario`` on a loop. Return the timeouts of its selects."""
    selector = Selector()
    loop = asyncio.SelectorEventLoop(selector)
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()
    return selector.timeouts


def loop_of(due: list[int], busy_poll_us: int = 300) -> LoopBusyPoller:
    """Return the poller of a peer that has just sent something."""
    loop = LoopBusyPoller(busy_poll_us, due.__len__)
    loop.received()
    return loop


async def until_it_sleeps(clock: Clock) -> None:
    """Return once the loop has made a turn without polling."""
    looks = -1
    while looks < clock.polls:
        looks = clock.polls
        await asyncio.sleep(0.01)


def test_the_loop_does_not_sleep_while_something_is_due(clock: Clock) -> None:
    due = [1]

    async def scenario() -> None:
        loop = loop_of(due)
        for _ in range(3):
            loop.expect()
        await until_it_sleeps(clock)

    timeouts = watch(scenario)
    assert clock.polls == 30
    assert timeouts.count(0) >= 30
    assert any(timeout for timeout in timeouts)  # then it did


def test_the_loop_lingers_half_as_long_for_the_next(clock: Clock) -> None:
    due = [1]

    async def scenario() -> None:
        loop_of(due).expect()
        asyncio.get_running_loop().call_soon(due.clear)
        await until_it_sleeps(clock)

    assert any(timeout for timeout in watch(scenario))
    assert clock.polls in (15, 16)


def test_the_loop_lingers_for_the_next_request(clock: Clock) -> None:
    """Ten requests, one after the other: the loop polls for each answer, and between an answer and the next request."""
    due: list[int] = []

    async def scenario() -> None:
        loop = loop_of(due)
        for _ in range(10):
            due.append(1)
            loop.expect()
            for _ in range(5):
                await asyncio.sleep(0)
            due.clear()
            loop.received()
            for _ in range(5):
                await asyncio.sleep(0)
        await until_it_sleeps(clock)

    timeouts = watch(scenario)
    slept = [index for index, timeout in enumerate(timeouts) if timeout]
    assert min(slept) > 100  # ten times ten turns were first
    assert clock.polls >= 80


def test_the_loop_lingers_again_after_the_next_request(clock: Clock) -> None:
    due: list[int] = []

    async def answered(loop: LoopBusyPoller, turns: int) -> bool:
        """Return True if the loop polls after an answer, within ``turns`` turns."""
        due.append(1)
        loop.expect()
        await asyncio.sleep(0)
        due.clear()
        loop.received()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        before = clock.polls
        for _ in range(turns):
            await asyncio.sleep(0)
        return clock.polls > before

    async def scenario() -> None:
        loop = loop_of(due)
        in_vain = [await answered(loop, 50) for _ in range(100)]
        assert 5 < in_vain.count(True) < 8
        well = [await answered(loop, 5) for _ in range(200)]
        assert all(well[-100:])
        assert await answered(loop, 50)  # polling fails, as if for the first time
        assert [await answered(loop, 5) for _ in range(3)] == [False, True, True]

    watch(scenario)


def test_the_loop_sleeps_without_a_poll_time(clock: Clock) -> None:
    async def scenario() -> None:
        loop_of([1], busy_poll_us=0).expect()
        await until_it_sleeps(clock)

    watch(scenario)
    assert not clock.polls


@pytest.mark.parametrize(("later_us", "looks"), [(300, 30), (301, 0)])
def test_the_loop_sleeps_while_it_waits_for_a_process_that_is_asleep(clock: Clock, later_us: int, looks: int) -> None:
    async def scenario() -> None:
        loop = loop_of([1])
        clock.us += later_us
        loop.expect()
        await until_it_sleeps(clock)

    watch(scenario)
    assert clock.polls == looks
