"""The pool of pinned memory, here with ordinary memory."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest

from headrace_torch.pinned_memory import PinnedArrays

FP32 = np.dtype(np.float32)


class Allocator:
    """Allocates ordinary memory. ``fails``: there is no more."""

    def __init__(self) -> None:
        self.blocks: list[npt.NDArray[np.uint8]] = []
        self.fails = False

    def __call__(self, size: int) -> npt.NDArray[np.uint8]:
        if self.fails:
            raise RuntimeError("CUDA error: out of memory")
        self.blocks.append(np.zeros(size, np.uint8))
        return self.blocks[-1]

    def has(self, array: npt.NDArray[np.float32]) -> bool:
        return any(np.shares_memory(array, block) for block in self.blocks)


@pytest.fixture
def allocator() -> Allocator:
    return Allocator()


def test_memory_is_reused_after_its_last_view_is_released(allocator: Allocator) -> None:
    pool = PinnedArrays(1 << 20, allocator)
    array = pool.array((3, 5), FP32)
    assert (array.shape, array.dtype, array.flags.writeable) == ((3, 5), FP32, True)
    array[:] = 7
    part, sent = array[1:2].reshape(-1), array[2:].reshape(-1).view(np.uint8).data
    del array
    other = pool.array((3, 5), FP32)
    other[:] = 1
    assert len(allocator.blocks) == 2
    assert part.tolist() == [7] * 5
    del part
    assert not np.shares_memory(pool.array((3, 5), FP32), allocator.blocks[0])
    assert np.frombuffer(sent, np.float32).tolist() == [7] * 5
    sent.release()
    assert len([array for array in (pool.array((4, 4), FP32), pool.array((2,), FP32)) if allocator.has(array)]) == 2
    assert len(allocator.blocks) == 3


def test_blocks_are_bounded_and_further_arrays_are_in_ordinary_memory(allocator: Allocator) -> None:
    pool = PinnedArrays(3 << 12, allocator)
    small = [pool.array((1024,), FP32) for _ in range(4)]
    assert [allocator.has(array) for array in small] == [True, True, True, False]
    assert sum(block.nbytes for block in allocator.blocks) == 3 << 12
    assert not allocator.has(pool.array((1 << 20,), FP32))
    del small
    assert allocator.has(pool.array((1024,), FP32))
    assert not allocator.has(PinnedArrays(0, allocator).array((1,), FP32))


def test_an_empty_array_takes_no_block(allocator: Allocator) -> None:
    assert PinnedArrays(1 << 20, allocator).array((0, 3), FP32).shape == (0, 3)
    assert allocator.blocks == []


def test_a_failed_allocation_is_not_repeated(allocator: Allocator) -> None:
    pool = PinnedArrays(1 << 20, allocator)
    allocator.fails = True
    assert pool.array((8,), FP32).shape == (8,)
    allocator.fails = False
    assert not allocator.has(pool.array((8,), FP32))


def test_threads_never_share_a_block(allocator: Allocator) -> None:
    pool = PinnedArrays(1 << 16, allocator)
    wrong: list[float] = []

    def use(number: int) -> None:
        for turn in range(300):
            array = pool.array((100,), FP32)
            array[:] = value = number * 1000 + turn
            wrong.extend(each for each in array[::33].tolist() if each != value)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(allocator.blocks) <= 8
