"""Memory of large requests: what the system gets back, and when. Discarded pages are read as zeros, by the kernel."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from headrace_hosts.held_bytes import HeldBytes
from headrace_hosts.returned_memory import discard, returned_memory

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="the system call is Linux's")
def test_whole_pages_are_discarded_and_what_stands_beside_them_stays() -> None:
    whole = np.full(MIB, 7, np.uint8)
    discard(whole[5:-5])
    pages = np.flatnonzero(whole == 0)
    assert MIB - 3 * 4096 <= len(pages) < MIB  # with pages of 4 KiB, all but the first and the last
    assert (whole[:5] == 7).all()
    assert (whole[-5:] == 7).all()


@pytest.mark.parametrize("is_short", [True, False])
def test_it_goes_back_when_nobody_refers_to_it_and_memory_is_short(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor on a view of a view, as NumPy makes it of a buffer, refers to it."""
    discarded: list[int] = []
    monkeypatch.setattr("headrace_hosts.returned_memory.discard", lambda memory: discarded.append(memory.nbytes))
    memory = returned_memory(MIB, lambda: is_short)
    tensor: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.ndarray((10,), np.uint8, memory.data[100:])
    del memory
    assert discarded == []
    tensor = tensor[2:]
    assert discarded == []
    del tensor
    assert discarded == [MIB] * is_short


def test_memory_is_short_from_half_of_the_budget_on() -> None:
    class Holder:
        waits_for_peer = is_slow = False

        def shed(self) -> None:
            raise AssertionError("nothing is over the budget")

    budget, holder = HeldBytes(100), Holder()
    for size, is_short in ((50, False), (51, True), (10, False)):
        budget.set(holder, size)
        assert budget.is_short() is is_short
