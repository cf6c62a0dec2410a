"""Memory that another program owns: mapped at any offset, found by its tensors, and unmapped with the last of them."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace_processes.ipc.shared_mapping import FileTooSmall, SharedMapping, mapping_of

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="client shared memory needs Linux")


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("client")
    os.ftruncate(descriptor, 3 * mmap.PAGESIZE)
    os.pwrite(descriptor, bytes(range(200)), mmap.PAGESIZE)
    yield descriptor
    os.close(descriptor)


def test_any_part_of_a_file_is_mapped(file: int) -> None:
    mapping = SharedMapping(file, mmap.PAGESIZE + 5, 10)
    assert bytes(mapping.memory) == bytes(range(5, 15))
    mapping.memory[0] = 99
    assert os.pread(file, 2, mmap.PAGESIZE + 5) == bytes([99, 6])


def test_a_file_that_is_too_short_is_refused(file: int) -> None:
    SharedMapping(file, 0, 3 * mmap.PAGESIZE)
    for offset, size in ((0, 3 * mmap.PAGESIZE + 1), (3 * mmap.PAGESIZE, 1)):
        with pytest.raises(FileTooSmall):
            SharedMapping(file, offset, size)


def test_a_tensor_is_found_in_its_mapping(file: int) -> None:
    mapping = SharedMapping(file, 0, mmap.PAGESIZE)
    array = np.asarray(mapping).view(np.float32).reshape(-1, 4)
    assert mapping_of(mapping.memory[8:16]) == (mapping, 8)
    assert mapping_of(array[2:3]) == (mapping, 32)
    assert mapping_of(np.frombuffer(mapping.memory[8:16].toreadonly(), np.int64)) == (mapping, 8)
    for other in (array[:, :2], array[::-1], array.copy(), np.zeros(3), memoryview(b"abc")):
        assert mapping_of(other) is None


def test_a_view_keeps_the_mapping(file: int) -> None:
    mapping = SharedMapping(file, mmap.PAGESIZE, 100)
    view, known = np.frombuffer(mapping.memory[50:60], np.uint8), weakref.ref[Any](mapping)
    del mapping
    gc.collect()
    assert view.tolist() == [*range(50, 60)]
    del view
    gc.collect()
    assert known() is None


def test_lost_pages_read_as_zeros(file: int) -> None:
    mapping = SharedMapping(file, mmap.PAGESIZE, 100)
    os.ftruncate(file, 0)
    assert bytes(mapping.memory) == bytes(100)
    assert mapping.is_lost


def test_a_mapping_without_reopen_is_not_shared_with_other_processes(file: int) -> None:
    with pytest.raises(OSError, match="not supported"):
        SharedMapping(file, 0, 8).reopen()
