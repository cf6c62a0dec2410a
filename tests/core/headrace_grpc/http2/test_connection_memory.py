"""The limits of one connection: unread answers, and large requests. The figures are arithmetic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace_grpc.http2.connection_memory import ConnectionMemory
from headrace_grpc.http2.frames import ENHANCE_YOUR_CALM, ConnectionFault
from headrace_grpc.http2.limits import Limits, Turns
from headrace_hosts.held_bytes import HeldBytes

LIMITS = Limits(unread_bytes=100, received_bytes=100)


class Held:
    """The memory of a connection, with a number of begun calls that the test sets."""

    def __init__(self, limit_bytes: int = 10_000, limits: Limits = LIMITS) -> None:
        self.begun = 0
        self.faults: list[ConnectionFault] = []
        self.ledger = HeldBytes(limit_bytes)
        self.memory = ConnectionMemory(limits, self.ledger, Turns(), lambda: self.begun, self.faults.append)


class Sent:
    """A stream that records its grants."""

    peer = "192.0.2.7"

    def __init__(self) -> None:
        self.granted_bytes = self.kept_bytes = 0
        self.is_counted = False
        self.receive_window = 0
        self.credits: list[int] = []
        self.refusals: list[str] = []

    def refuse(self, reason: str) -> None:
        self.refusals.append(reason)

    def credit(self, size_bytes: int) -> None:
        self.credits.append(size_bytes)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_an_answer_may_wait_if_it_fits_or_is_alone() -> None:
    async def scenario() -> None:
        memory = Held().memory
        assert memory.has_room(1000)
        memory.wait(60)
        assert memory.has_room(40)
        assert not memory.has_room(41)
        memory.dequeued(60)
        assert memory.has_room(1000)

    run(scenario)


def test_no_call_begins_whose_answer_may_not_fit() -> None:
    async def scenario() -> None:
        connection = Held()
        memory = connection.memory
        memory.wait(30)
        for connection.begun, is_full in (
            (0, False),
            (1, False),
            (2, True),
        ):  # 30 unread, and 30 for each begun and the new
            assert memory.is_full is is_full
            assert (connection.begun >= memory.most_active) is is_full
        connection.begun = 3
        memory.long_calls = 2
        assert not memory.is_full
        memory.dequeued(30)
        connection.begun = memory.long_calls = 0
        memory.wait(1000)
        memory.dequeued(1000)
        assert not memory.is_full  # nothing waits and nothing runs: any answer fits

    run(scenario)


def test_calls_that_were_held_back_begin_when_answers_were_read() -> None:
    async def scenario() -> None:
        connection = Held()
        memory = connection.memory
        memory.wait(60)
        begun: list[str] = []
        for name in ("first", "second"):
            connection.begun += 1  # open, and held back
            memory.hold_back(lambda name=name: begun.append(name))  # type: ignore[misc]
        await asyncio.sleep(0)
        assert begun == []
        memory.dequeued(30)
        await asyncio.sleep(0)
        assert begun == ["first"]  # 30 unread and 60 for it; two would be 150
        memory.dequeued(30)
        await asyncio.sleep(0)
        assert begun == ["first"]  # its answer and the next would be 120
        connection.begun -= 1  # it is answered
        memory.let_begin()
        await asyncio.sleep(0)
        assert begun == ["first", "second"]

    run(scenario)


def test_a_large_answer_is_forgotten_by_halves() -> None:
    async def scenario() -> None:
        connection = Held()
        memory = connection.memory
        memory.wait(80)
        memory.forget_largest()
        assert memory.largest_bytes == 80  # it waits
        memory.dequeued(80)
        memory.forget_largest()
        assert memory.largest_bytes == 40
        assert memory.most_active == 100 // 40
        for _ in range(6):
            memory.forget_largest()
        assert memory.largest_bytes == 0
        assert memory.most_active > 1_000_000

    run(scenario)


def test_a_large_message_is_granted_when_there_is_room_in_order() -> None:
    async def scenario() -> None:
        memory = Held().memory
        first, second, third = Sent(), Sent(), Sent()
        memory.grant(first, 1000)  # alone, any size
        memory.grant(second, 50)
        memory.grant(third, 10)
        assert [each.credits for each in (first, second, third)] == [[1000], [], []]
        assert second.is_counted
        memory.release(first)
        assert [each.credits for each in (first, second, third)] == [[1000], [50], [10]]
        assert not first.is_counted
        assert first.granted_bytes == 0

    run(scenario)


def test_a_stream_that_ends_while_it_waits_gets_nothing() -> None:
    async def scenario() -> None:
        memory = Held().memory
        first, second, third = Sent(), Sent(), Sent()
        memory.grant(first, 90)
        memory.grant(second, 50)
        memory.grant(third, 50)
        memory.release(second)
        memory.release(first)
        assert [each.credits for each in (first, second, third)] == [[90], [], [50]]

    run(scenario)


def test_buffered_bytes_are_counted_for_all_connections_together() -> None:
    async def scenario() -> None:
        connection, stream = Held(), Sent()
        connection.memory.keep(stream, 70)
        connection.memory.wait(20)
        assert connection.ledger.total_bytes == 90
        connection.memory.keep(stream, 30)
        connection.memory.dequeued(20)
        assert (
            connection.ledger.total_bytes == 50
        )  # sent, and its memory exists until the last byte of its answer is sent
        connection.memory.freed(20, 5)
        assert connection.ledger.total_bytes == 35  # five more are in a transport that is full
        connection.memory.freed(0, 0)
        assert connection.ledger.total_bytes == 30
        connection.memory.release(stream, 5)
        assert (connection.memory.received_bytes, stream.is_counted) == (5, True)
        assert not connection.memory.end()
        assert connection.ledger.total_bytes == 0
        connection.memory.wait(50)
        assert connection.ledger.total_bytes == 0  # it has ended

    run(scenario)


def test_a_connection_ends_if_all_together_hold_too_much() -> None:
    async def scenario() -> None:
        connection = Held(limit_bytes=1 << 20)
        connection.memory.wait((9 << 17) + 1)
        await asyncio.sleep(0)
        (fault,) = connection.faults
        assert fault.code == ENHANCE_YOUR_CALM
        assert connection.ledger.total_bytes == 0
        assert connection.memory.end()  # more than 1 MiB: its memory is returned to the system

    run(scenario)


MIB = 1 << 20


class Large(Sent):
    """A stream of a large message, whose peer sends all that it may."""

    def __init__(self, window_bytes: int) -> None:
        super().__init__()
        self.receive_window = window_bytes

    def credit(self, size_bytes: int) -> None:
        super().credit(size_bytes)
        self.receive_window += size_bytes

    def arrive(self, memory: ConnectionMemory, size_bytes: int, missing_bytes: int) -> None:
        self.receive_window -= size_bytes
        memory.keep(self, self.kept_bytes + size_bytes)
        memory.grant(self, missing_bytes)


def test_a_large_message_gets_credit_as_it_arrives() -> None:
    async def scenario() -> None:
        connection = Held(100 * MIB, Limits())
        memory, stream = connection.memory, Large(256 << 10)
        memory.grant(stream, 16 * MIB)
        assert stream.credits == []  # it is only announced
        assert connection.ledger.total_bytes == 0
        stream.arrive(memory, 128 << 10, 16 * MIB)
        assert stream.credits == [MIB]
        assert connection.ledger.total_bytes == (256 << 10) + MIB  # granted bytes count before they are sent
        while len(stream.credits) < 20 and sum(stream.credits) < 16 * MIB:
            stream.arrive(memory, 128 << 10, 1)
            assert stream.receive_window <= MIB + 3 * stream.kept_bytes
        assert sum(stream.credits) == 16 * MIB
        memory.release(stream)
        assert connection.ledger.total_bytes == 0

    run(scenario)


def test_a_large_message_waits_for_memory_and_is_refused_in_the_end() -> None:
    async def scenario() -> None:
        connection = Held(10 * MIB, Limits())
        connection.ledger._wait_s = 0.01
        other, stream = Large(0), Large(256 << 10)
        connection.memory.keep(other, 9 * MIB)
        connection.memory.grant(stream, 4 * MIB)
        stream.arrive(connection.memory, 256 << 10, 4 * MIB)
        assert connection.memory.holds_back(stream)
        assert stream.credits == []
        while connection.ledger.waiting:
            await asyncio.sleep(0.05)
        (reason,) = stream.refusals
        assert "has waited for 0.01 s" in reason
        assert not connection.memory.holds_back(stream)

    run(scenario)


def test_a_large_message_goes_on_when_there_is_memory() -> None:
    async def scenario() -> None:
        connection = Held(10 * MIB, Limits())
        other, stream, ended = Large(0), Large(256 << 10), Large(256 << 10)
        connection.memory.keep(other, 9 * MIB)
        for each in (ended, stream):
            connection.memory.grant(each, 4 * MIB)
            each.arrive(connection.memory, 256 << 10, 4 * MIB)
        connection.memory.release(ended)
        connection.memory.release(other)
        await asyncio.sleep(0)
        assert (ended.credits, stream.credits) == ([], [4 * MIB])
        assert connection.ledger.total_bytes == (256 << 10) + 4 * MIB

    run(scenario)


def test_a_message_that_can_not_wait_counts_whole_or_is_refused() -> None:
    """While memory is short, of messages that peers have all credit for."""

    async def scenario() -> None:
        connection = Held(MIB, Limits())
        memory = connection.memory
        first, second, large = Large(256 << 10), Large(256 << 10), Large(256 << 10)
        memory.keep(Large(0), 3 << 18)
        for stream in (first, second, large):
            memory.keep(stream, 20 << 10)
        assert memory.may_end(first, 180 << 10)
        assert connection.ledger.total_bytes == (3 << 18) + (240 << 10)
        assert not memory.may_end(second, 180 << 10)
        assert memory.may_end(large, 2 * MIB)  # it waits before it gets more credit
        assert connection.ledger.total_bytes == (3 << 18) + (240 << 10)
        memory.keep(first, 120 << 10)
        assert memory.may_end(first, 80 << 10)
        assert connection.ledger.total_bytes == (3 << 18) + (240 << 10)  # what arrives was counted before
        memory.release(first)
        assert memory.may_end(second, 180 << 10)

    run(scenario)


def test_a_connection_whose_requests_run_does_not_wait_for_its_peer() -> None:
    async def scenario() -> None:
        arrives = [False]
        memory = ConnectionMemory(
            LIMITS, HeldBytes(1000), Turns(), lambda: 0, lambda fault: None, arrives=lambda: arrives[0]
        )
        memory.keep(Sent(), 70)
        assert not memory.waits_for_peer
        arrives[0] = True
        waits = [memory.waits_for_peer]
        arrives[0] = False
        memory.wait(20)
        waits.append(memory.waits_for_peer)
        assert waits == [True, True]

    run(scenario)
