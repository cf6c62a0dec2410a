"""The cache ``local``: evictions, and the memory that it reports."""

from __future__ import annotations

import gc
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.caches.kept_responses import own
from headrace.caches.local import LocalCache, LocalCacheParameters
from headrace.messages.response import InferResponse
from headrace.messages.tensor import BytesTensor
from headrace.telemetry.published import read_metrics


def response(floats: int = 4, **parameters: str) -> InferResponse:
    return InferResponse({"y": np.ones(floats, np.float32)}, parameters)


def test_metrics_are_the_used_bytes_and_the_evictions() -> None:
    one = own(response())
    cache = LocalCache(LocalCacheParameters(2 * one.size_bytes))
    for key in (b"a", b"b", b"c", b"d"):
        cache.put(key, one)
    assert [value for _, value in read_metrics(cache)] == [2, 2 * one.size_bytes, 2]


def test_a_size_must_be_given_in_tritons_words() -> None:
    for size in (0, -5):
        with pytest.raises(ValueError, match="Failed to initialize LocalCache: config didn't contain a valid 'size'"):
            LocalCacheParameters(size)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_least_recently_used_entry_is_evicted_first(steps: list[tuple[int, bool]]) -> None:
    """Compared with a simple model of a cache with room for three entries."""
    entry = own(response())
    cache = LocalCache(LocalCacheParameters(3 * entry.size_bytes))
    model: OrderedDict[int, object] = OrderedDict()
    for number, is_put in steps:
        key = bytes([number])
        if is_put:
            cache.put(key, own(response()))
            if number not in model:
                model[number] = None
                if len(model) > 3:
                    model.popitem(last=False)
        else:
            assert (cache.get(key) is not None) == (number in model)
            if number in model:
                model.move_to_end(number)
        assert len(cache) == len(model)
        assert cache.used_bytes == len(model) * entry.size_bytes


def test_a_large_entry_makes_room_for_itself_and_one_too_large_changes_nothing() -> None:
    small, large = own(response()), own(response(1000))
    cache = LocalCache(LocalCacheParameters(large.size_bytes + small.size_bytes))
    for number in range(3):
        cache.put(bytes([number]), own(response()))
    cache.put(b"large", large)
    assert [cache.get(bytes([number])) is not None for number in range(3)] == [False, False, True]
    cache.put(b"too large", own(response(4000)))
    assert cache.get(b"large") is large
    cache.close()
    assert (len(cache), cache.used_bytes) == (0, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: response(4),
        lambda: response(100_000),
        lambda: response(1, mood="x" * 300),
        lambda: InferResponse({f"output {n}": np.ones(3) for n in range(9)}),
        lambda: InferResponse({"s": BytesTensor.from_items([b"word"] * 500, (500,))}),
    ],
    ids=["small", "large", "parameters", "many", "strings"],
)
def test_entries_take_no_more_memory_than_they_count(make: object) -> None:
    assert callable(make)
    cache, count = LocalCache(LocalCacheParameters(1 << 40)), 300
    made = make()
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            entry = own(made)
            for tensor in entry.outputs.values():
                if isinstance(tensor, BytesTensor):
                    _ = tensor.offsets
            cache.put(number.to_bytes(32, "little"), entry)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= cache.used_bytes <= 2.5 * taken


def test_an_entry_keeps_no_reference_to_the_original() -> None:
    received = bytearray(1 << 20)
    view = np.frombuffer(received, np.uint8)[10:20]
    strings = BytesTensor(memoryview(received)[:4], (1,))
    entry = own(InferResponse({"a": view, "s": strings}))
    received[10] = 7
    assert entry.size_bytes < 5000
    assert list(np.asarray(entry.outputs["a"])) == [0] * 10
    del view, strings
    received.clear()  # raises BufferError while a view of it exists
