"""Bodies that arrive while memory is short, and many at once: a connection waits unread. No sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace_hosts.held_bytes import HeldBytes

MIB = 1 << 20
Connect = Callable[..., Any]


class Other:
    """Another connection, whose request runs."""

    waits_for_peer = is_slow = False

    def shed(self) -> None:
        raise AssertionError("it does not wait for its peer")


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def limit(peer: Any, limit_bytes: int, wait_s: float = 30) -> HeldBytes:
    """Give the connections of ``peer`` a budget, and return it."""
    budget: HeldBytes = peer.connections.budget
    budget.limit_bytes, budget.soft_bytes = limit_bytes, limit_bytes * 3 // 4
    budget._wait_s = wait_s
    return budget


def announced(size: int) -> bytes:
    return b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size


CHUNKED = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(size: int) -> bytes:
    return b"%x\r\n%s\r\n" % (size, bytes(size))


@pytest.mark.parametrize("form", ["length", "chunks"])
def test_a_large_body_waits_unread_and_is_read_when_there_is_memory(connect: Connect, form: str) -> None:
    async def scenario() -> None:
        peer, other = connect(input_bytes=8 * MIB), Other()
        budget = limit(peer, 4 * MIB)
        budget.set(other, 3 * MIB + 1)
        peer.send(announced(2 * MIB) if form == "length" else CHUNKED)
        peer.send(bytes(200_000) if form == "length" else chunk(200_000))
        assert not peer.wire.reads
        assert budget.waiting == 1
        rest = bytes(2 * MIB - 200_000) if form == "length" else chunk(2 * MIB - 200_000) + b"0\r\n\r\n"
        peer.send(rest)  # stays in the socket
        assert peer.statuses == []
        budget.set(other, 0)
        await asyncio.sleep(0)
        assert peer.wire.reads
        peer.send(b"")
        while not peer.statuses:  # a body in chunks reserves more than once
            await asyncio.sleep(0)
            peer.send(b"")
        assert peer.statuses == [200]
        assert len(peer.requests[0].body) == 2 * MIB
        assert budget.total_bytes == 0

    run(scenario)


def test_a_body_that_waits_too_long_is_refused_with_a_time_to_try_again(connect: Connect) -> None:
    async def scenario() -> None:
        peer, other = connect(), Other()
        budget = limit(peer, 4 * MIB, wait_s=0)
        budget.set(other, 3 * MIB + 1)
        peer.send(announced(2 * MIB))
        peer.send(bytes(200_000))
        while budget.waiting:
            await asyncio.sleep(0.05)
        assert peer.statuses == [503]
        assert b"Retry-After: 1\r\n" in peer.answer
        assert b"has waited for 0 s" in peer.answer
        assert budget.total_bytes == 3 * MIB + 1

    run(scenario)


def test_small_requests_pass_when_all_memory_is_in_use(connect: Connect) -> None:
    async def scenario() -> None:
        peer, other = connect(), Other()
        limit(peer, 4 * MIB).set(other, 4 * MIB)
        peer.send(announced(1000) + bytes(1000))
        peer.send(announced(60_000))
        peer.send(bytes(60_000))
        assert peer.statuses == [200, 200]

    run(scenario)


def test_a_connection_that_is_lost_while_it_waits_is_forgotten(connect: Connect) -> None:
    async def scenario() -> None:
        peer, other = connect(), Other()
        budget = limit(peer, 4 * MIB)
        budget.set(other, 3 * MIB + 1)
        peer.send(announced(2 * MIB))
        peer.send(bytes(200_000))
        assert budget.waiting == 1
        peer.protocol.connection_lost(None)
        assert (budget.waiting, budget.total_bytes) == (0, 3 * MIB + 1)

    run(scenario)


def test_a_body_that_waits_is_neither_slow_nor_late(connect: Connect) -> None:
    """Its caller may not send: the time limits of callers do not run."""

    async def scenario() -> None:
        peer, other = connect(stall_timeout_s=2), Other()
        budget = limit(peer, 4 * MIB)
        budget.set(other, 3 * MIB + 1)
        peer.send(announced(2 * MIB))
        peer.send(bytes(200_000))
        for _ in range(10):
            peer.protocol.sweep()
        assert peer.statuses == []
        assert not peer.protocol.waits_for_peer

    run(scenario)


def test_of_many_bodies_that_arrive_each_has_its_turn(connect: Connect) -> None:
    """Beyond 16 connections, one reads 64 KiB at most, and then waits for the next turn of the loop."""

    async def scenario() -> None:
        peer = connect()
        budget = limit(peer, 4096 * MIB)
        for _ in range(300):
            budget.set(Other(), 100_000)
        peer.send(announced(2 * MIB))
        peer.send(bytes(100_000))
        peer.takes_turns = False
        peer.send(bytes(MIB))
        assert not peer.wire.reads
        first = MIB - len(peer.unread)
        assert first <= 65536
        peer.takes_turns = True
        peer.take_turns()
        assert peer.wire.reads
        while peer.unread:
            peer.send(b"")
            peer.take_turns()
        peer.send(bytes(MIB - 100_000))
        assert peer.statuses == [200]

    run(scenario)


def test_a_response_counts_from_when_its_request_does_not(connect: Connect) -> None:
    async def scenario() -> None:
        peer = connect()
        budget = limit(peer, 64 * MIB)
        peer.wire.unsent = 5 * MIB
        peer.send(announced(2 * MIB))
        peer.takes_turns = False
        peer.send(bytes(2 * MIB))
        assert budget.total_bytes == 5 * MIB
        peer.wire.unsent = 0
        peer.takes_turns = True
        peer.take_turns()
        assert budget.total_bytes == 0

    run(scenario)
