"""Calls from threads reach the event loop in order, with one wake-up for many."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.executors.threads import LoopMailbox


def test_calls_sent_before_the_loop_wakes_arrive_in_order_with_one_wake_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        wakes: list[object] = []
        seen: list[int] = []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *arguments: wakes.append(wake(*arguments)))
        mailbox = LoopMailbox(loop)
        sent: list[bool] = []
        for numbers in (range(1000), range(1000, 2000)):
            thread = threading.Thread(target=lambda n=numbers: sent.extend(mailbox.send(seen.append, i) for i in n))
            thread.start()
            thread.join()  # the loop is busy with this meanwhile
            await asyncio.sleep(0)
        assert seen == list(range(2000))
        assert all(sent)
        assert len(wakes) == 2

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_call_sent_from_the_loop_runs_after_the_send() -> None:
    async def scenario() -> None:
        mailbox = LoopMailbox(asyncio.get_running_loop())
        seen: list[int] = []
        mailbox.send(seen.append, 1)
        assert seen == []
        await asyncio.sleep(0)
        assert seen == [1]

    asyncio.run(scenario())


def test_one_call_that_fails_does_not_keep_the_next_from_crossing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        mailbox = LoopMailbox(asyncio.get_running_loop())
        seen: list[int] = []
        mailbox.send(lambda: 1 // 0)
        mailbox.send(seen.append, 1)
        await asyncio.sleep(0)
        assert seen == [1]

    asyncio.run(scenario())
    assert "a call from a model's thread failed" in caplog.text


def test_send_after_the_end_of_the_loop_raises_each_time() -> None:
    async def make() -> LoopMailbox:
        return LoopMailbox(asyncio.get_running_loop())

    mailbox = asyncio.run(make())
    assert [mailbox.send(print), mailbox.send(print), mailbox.send(print)] == [False, False, False]


def test_send_raises_if_the_loop_ended_before_it_woke() -> None:
    loop = asyncio.new_event_loop()
    mailbox = LoopMailbox(loop)
    assert mailbox.send(print)
    loop.close()
    assert not mailbox.send(print)
