"""The bytes that all connections of a port hold together."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace_hosts.held_bytes import HeldBytes, default_limit


class Connection:
    """A holder, which notes that it was ended."""

    def __init__(self, is_slow: bool = False, waits_for_peer: bool = True) -> None:
        self.is_slow, self.waits_for_peer = is_slow, waits_for_peer
        self.is_over = False

    def shed(self) -> None:
        self.is_over = True


def held(limit_bytes: int, *sizes: tuple[Connection, int]) -> list[bool]:
    """Which of the connections have ended, once they hold so much."""
    return asyncio.run(_held(limit_bytes, *sizes))


async def _held(limit_bytes: int, *sizes: tuple[Connection, int]) -> list[bool]:
    ledger = HeldBytes(limit_bytes)
    for connection, size in sizes:
        ledger.set(connection, size)
    assert ledger.total_bytes == sum(size for _, size in sizes)
    await asyncio.sleep(0)
    assert ledger.total_bytes == sum(size for connection, size in sizes if not connection.is_over)
    return [connection.is_over for connection, _ in sizes]


def test_up_to_the_limit_nothing_ends() -> None:
    assert held(100, (Connection(), 60), (Connection(), 40)) == [False, False]


def test_the_one_that_holds_most_ends_and_the_others_do_not() -> None:
    assert held(100, (Connection(), 20), (Connection(), 60), (Connection(), 21)) == [False, True, False]


def test_slow_callers_end_before_one_that_holds_more() -> None:
    small = [Connection(is_slow=True) for _ in range(3)]
    sizes = [(each, 10) for each in small]
    large, *ended = held(100, (Connection(), 75), *sizes)
    assert (large, sum(ended)) == (False, 2)


def test_what_only_the_server_works_for_does_not_end() -> None:
    working = Connection(waits_for_peer=False)
    assert held(100, (working, 90), (Connection(), 11)) == [False, True]


def test_what_is_let_go_is_not_counted() -> None:
    asyncio.run(_let_go())


async def _let_go() -> None:
    ledger, one, other = HeldBytes(100), Connection(), Connection()
    for _ in range(10):
        ledger.set(one, 90)
        ledger.set(one, 0)
        ledger.set(other, 30)
    await asyncio.sleep(0)
    assert (ledger.total_bytes, one.is_over, other.is_over) == (30, False, False)


def test_the_limit_is_a_quarter_of_the_memory_unless_given() -> None:
    line = Path("/proc/meminfo").read_text().split("\n", 1)[0]
    assert 0 < HeldBytes(0).limit_bytes == default_limit() <= int(line.split()[1]) * 1024 // 4 + 4096
    assert HeldBytes(7).limit_bytes == 7
