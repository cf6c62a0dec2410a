"""Decompression within limits. The oracle is the standard library."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.off_loop import UNBOUNDED, TooLargeForLoop
from headrace_hosts.inflating import CorruptData, TooLarge, inflate

GZIP = zlib.MAX_WBITS | 16
MIB = 1 << 20


def content(data: bytes, limit: int = 64 * MIB, loop_limit: int = UNBOUNDED) -> bytes:
    return bytes(inflate(memoryview(data), GZIP, limit, loop_limit))


@given(st.binary(max_size=2000), st.integers(1, 400))
def test_content_is_that_of_the_standard_library(piece: bytes, times: int) -> None:
    data = piece * times
    assert content(gzip.compress(data)) == data


@pytest.mark.parametrize("size", [0, 1, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 3 * MIB])
def test_sizes_around_a_step(size: int) -> None:
    data = bytes(size)
    assert content(gzip.compress(data)) == data


@pytest.mark.parametrize("size", [1, 1000, MIB])
def test_the_limit_is_the_last_size_that_is_accepted(size: int) -> None:
    packed = gzip.compress(bytes(size))
    assert len(content(packed, limit=size)) == size
    with pytest.raises(TooLarge) as refused:
        content(packed, limit=size - 1)
    assert refused.value.size_bytes > size - 1


def test_a_bomb_is_stopped_soon_after_the_limit() -> None:
    with pytest.raises(TooLarge) as refused:
        content(gzip.compress(bytes(64 * MIB)), limit=MIB)
    assert refused.value.size_bytes < 2 * MIB


def test_the_loop_reads_neither_large_input_nor_large_output() -> None:
    packed = gzip.compress(bytes(100_000))
    assert len(content(packed, loop_limit=100_000)) == 100_000
    with pytest.raises(TooLargeForLoop):
        content(packed, loop_limit=99_999)
    with pytest.raises(TooLargeForLoop):
        content(packed, loop_limit=len(packed) - 1)


def test_corrupt_data_is_told_from_truncated_data() -> None:
    packed = gzip.compress(bytes(range(256)) * 100)
    with pytest.raises(CorruptData, match="is truncated") as truncated:
        content(packed[:-20])
    assert truncated.value.is_truncated
    with pytest.raises(CorruptData, match="is malformed") as malformed:
        content(b"not gzip")
    assert not malformed.value.is_truncated
    with pytest.raises(CorruptData):
        content(b"")
