"""Calls from threads reach the event loop in order, with one wake-up for many."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.executors.threads import LoopMailbox


def test_what_a_thread_sends_before_the_loop_looks_crosses_in_order_with_one_wake(
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


def test_what_the_loop_sends_itself_happens_after_it_has_been_sent() -> None:
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


def test_whoever_sends_after_the_loop_has_ended_is_told_every_time() -> None:
    async def make() -> LoopMailbox:
        return LoopMailbox(asyncio.get_running_loop())

    mailbox = asyncio.run(make())
    assert [mailbox.send(print), mailbox.send(print), mailbox.send(print)] == [False, False, False]


def test_whoever_sends_is_told_that_the_loop_ended_before_it_looked() -> None:
    loop = asyncio.new_event_loop()
    mailbox = LoopMailbox(loop)
    assert mailbox.send(print)
    loop.close()
    assert not mailbox.send(print)
