"""Tensors of PyTorch in memory that processes share: the memory is freed with the last tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headrace_processes.ipc.arena import Arena, Reader, Writer

DERIVED: dict[str, Callable[[Any], Any]] = {
    "torch": torch.from_numpy,
    "a slice of torch": lambda view: torch.from_numpy(view)[3:50],
}


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(1 << 20)
    yield arena
    arena.close()


@pytest.mark.parametrize("make", DERIVED.values(), ids=DERIVED.keys())
def test_memory_is_free_once_its_last_tensor_is_released(arena: Arena, make: Callable[[Any], Any]) -> None:
    content = memoryview(bytes(range(100)))
    offset = Writer(arena).place(content)
    assert offset is not None
    freed: list[int] = []
    tensor = make(Reader(arena).view(offset, 100, freed.append))
    assert bytes(tensor.numpy()) in bytes(content)
    assert freed == []
    del tensor
    assert freed == [offset]
