"""`find` returns the same strings of a large tensor as a walk from each string to the next."""

from __future__ import annotations

import random
import tracemalloc
from struct import unpack_from

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidArgument
from headrace.messages import strings
from headrace.messages.tensor import BytesTensor


def walk(data: bytes) -> list[int]:
    """Return the offsets by the definition, one step per string. Raises `InvalidArgument`."""
    position, offsets = 0, [0]
    while position < len(data):
        if len(data) - position < 4:
            left = len(data) - position
            raise InvalidArgument(
                f"incomplete string length indicator, expecting 4 bytes but only {left} bytes available"
            )
        position += 4 + unpack_from("<I", data, position)[0]
        offsets.append(position)
    if position != len(data):
        raise InvalidArgument(
            f"string element {len(offsets) - 2} runs {position - len(data)} bytes past the end of the data"
        )
    return offsets


def outcome(data: bytes, walked: bool) -> list[int] | str:
    try:
        return walk(data) if walked else BytesTensor(data, ()).offsets.tolist()
    except InvalidArgument as error:
        return error.message


def wire(items: list[bytes]) -> bytes:
    return b"".join(len(item).to_bytes(4, "little") + item for item in items)


text = st.text("ab c", min_size=1, max_size=12).map(str.encode)
zeros = st.lists(st.sampled_from([b"\0", b"\1", b"\4", b"a"]), max_size=9).map(b"".join)
long = st.sampled_from([255, 256, 257, 512, 65535, 65536, 70000]).map(lambda size: b"x" * size)
item = st.one_of(text, st.just(b""), zeros, st.binary(max_size=300), long)


@st.composite
def many(draw: st.DrawFn) -> list[bytes]:
    """Return runs of similar strings, as long as several windows, with other strings between them."""
    items: list[bytes] = []
    for _ in range(draw(st.integers(1, 4))):
        run = draw(st.lists(st.one_of(text, text, st.just(b""), zeros), min_size=1, max_size=6))
        items += run * draw(st.sampled_from([1, 60, 300, 3000]))
        items += draw(st.lists(item, max_size=2))
    return items


@settings(deadline=None, max_examples=60)
@given(many())
def test_strings_are_found_cut_and_joined_whatever_is_in_them(items: list[bytes]) -> None:
    data = wire(items)
    offsets = strings.find(memoryview(data))
    assert offsets.dtype == np.int64
    assert offsets.tolist() == walk(data)
    assert strings.split(memoryview(data), offsets) == items
    buffer, places = strings.join(items)
    assert bytes(buffer) == data
    assert places is None or places.tolist() == offsets.tolist()


@settings(deadline=None, max_examples=60)
@given(many(), st.integers(0, 1 << 30), st.one_of(st.binary(max_size=9), st.just(b"\xff\xff\xff\xff")), st.booleans())
def test_malformed_strings_are_refused_in_the_words_of_the_slow_reader(
    items: list[bytes], place: int, rubbish: bytes, cut: bool
) -> None:
    data = wire(items)
    place %= len(data) + 1
    data = data[:place] + rubbish + (b"" if cut else data[place + len(rubbish) :])
    assert outcome(data, walked=False) == outcome(data, walked=True)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.sampled_from([0, 1, 2, 4, 256]), st.integers(0, 200_000))
def test_garbage_is_judged_as_the_walk_judges_it(seed: int, most: int, size: int) -> None:
    garbage = bytes(size) if not most else bytes(random.Random(seed).choices(range(most), k=size))
    assert outcome(garbage, walked=False) == outcome(garbage, walked=True)


@pytest.mark.parametrize("size", [*range(1010, 1040), *range(32 * 1024 - 5, 32 * 1024 + 5)])
@pytest.mark.parametrize("last", [0, 1, 2, 3, 4, 5])
def test_the_edges_of_a_window_hide_nothing(size: int, last: int) -> None:
    data = wire([b"ab"] * (size // 6)) + bytes(size % 6) + last.to_bytes(4, "little") + b"abcd"
    assert outcome(data, walked=False) == outcome(data, walked=True)


@pytest.mark.parametrize("content", [b"\0", b"\0\0\0\1", b"\4\0\0\0", b"x"])
def test_memory_to_find_strings_is_bounded_by_the_data(content: bytes) -> None:
    data = memoryview(wire([b"abc"]) + content * (8 * 1024 * 1024 // len(content)))
    tracemalloc.start()
    strings.find(data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most <= 5 * data.nbytes  # eight bytes for each four, joined once


def test_arrays_of_text_bytes_and_other_things_are_encoded_as_the_client_encodes_them() -> None:
    words = ["", "é", "a" * 300, "\0", "z"] * 100
    expected = [word.encode() for word in words]
    for array in (
        np.array(words, object),
        np.array(expected, object),
        np.array([*words[:-1], b"z"], object),
        np.array([np.bytes_(word) for word in expected], object),
    ):
        tensor = BytesTensor.from_objects(array.reshape(50, 10))
        assert (tensor.items(), tensor.shape) == (expected, (50, 10))
    assert BytesTensor.from_objects(np.array([1, None, 2.5, True], object)).items() == [b"1", b"None", b"2.5", b"True"]
    assert BytesTensor.from_objects(np.array(["b", "é"] * 50)).items() == [b"b", "é".encode()] * 50
    assert BytesTensor.from_objects(np.array([b"b", b"cd"] * 50)).items() == [b"b", b"cd"] * 50


def test_rows_of_many_strings_are_cut_from_their_own_part() -> None:
    items = [b"%d" % number for number in range(10_000)]
    tensor = BytesTensor(wire(items), (1000, 10))
    assert tensor.rows(300, 700).items() == items[3000:7000]
