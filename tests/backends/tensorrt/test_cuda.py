"""One object per GPU, and the release of pinned memory on any thread."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from headrace_tensorrt import cuda


@pytest.mark.usefixtures("driver")
def test_concurrent_threads_get_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_devices", {})
    barrier = threading.Barrier(8)

    def ask(_: int) -> int:
        barrier.wait(30)
        return id(cuda.cuda_device(1))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1


def test_a_block_is_free_once_its_last_view_is_released(driver: Any) -> None:
    device = cuda.cuda_device(0)
    device.enter()
    gc.collect()  # blocks of other tests
    device.pinned.trim()
    before = driver.pinned_count
    array, address = device.pinned.take(1000)
    array[:] = 7
    view = array.view(np.int8)[100:200].reshape(10, 10)[3]
    del array
    gc.collect()
    other, other_address = device.pinned.take(1000)
    assert other_address != address
    assert view.tolist() == [7] * 10
    del view, other
    gc.collect()
    assert {device.pinned.take(1000)[1], device.pinned.take(1000)[1]} <= {address, other_address}
    device.pinned.trim()
    assert driver.pinned_count == before
