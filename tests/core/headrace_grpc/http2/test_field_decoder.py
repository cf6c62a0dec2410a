"""Header blocks to fields, held to what the ``hpack`` library makes of the same blocks."""

from __future__ import annotations

from typing import Any

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_grpc.http2.field_decoder import FieldDecoder, size_of
from headrace_grpc.http2.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, ConnectionFault

#: Strings whose lengths are written in one byte, and in two, and in three.
LONG = [b"v" * size for size in (126, 127, 128, 254, 255, 1000)]
NAMES = st.sampled_from([b":method", b":path", b"x-request-id", b"user-agent", b"te", b"", b"a" * 130])
VALUES = st.one_of(st.binary(max_size=20), st.sampled_from([b"POST", b"trailers", *LONG]))
BLOCKS = st.lists(st.lists(st.tuples(NAMES, VALUES, st.booleans(), st.booleans()), max_size=6), max_size=6)


def ours(decoder: FieldDecoder, block: bytes) -> Any:
    try:
        front = decoder.front(block)
        if size_of([*front]) <= decoder.most_bytes // 2:
            fields = [*front, *decoder.decode(block, len(front))]
            return fields if size_of(fields) <= decoder.most_bytes else ENHANCE_YOUR_CALM
        return decoder.decode(block)
    except ConnectionFault as fault:
        return fault.code


def theirs(decoder: hpack.Decoder, block: bytes) -> Any:
    try:
        return [tuple(field) for field in decoder.decode(block, raw=True)]
    except hpack.OversizedHeaderListError:
        return ENHANCE_YOUR_CALM
    except (hpack.HPACKError, IndexError):
        return COMPRESSION_ERROR


@settings(max_examples=300, deadline=None)
@given(BLOCKS, st.data(), st.sampled_from([200, 2000, 32768]))
def test_blocks_mean_what_they_mean_to_the_library(blocks: list[Any], data: st.DataObject, most_bytes: int) -> None:
    """One connection after the other, with blocks as clients write them, and damaged ones."""
    encoder, decoder, library = hpack.Encoder(), FieldDecoder(most_bytes), hpack.Decoder(most_bytes)
    for number, fields in enumerate(blocks):
        block = b""
        if number == 2:
            encoder.header_table_size = 100
        for name, value, is_packed, is_secret in fields:
            field = hpack.NeverIndexedHeaderTuple(name, value) if is_secret else (name, value)
            block += encoder.encode([field], huffman=is_packed)
        if block and data.draw(st.integers(0, 3)) == 0:
            at = data.draw(st.integers(0, len(block) - 1))
            block = block[:at] + data.draw(st.binary(max_size=4)) + block[at + data.draw(st.integers(0, 4)) :]
        found, wanted = ours(decoder, block), theirs(library, block)
        if block[:1] and block[0] & 0xE0 == 0x20 and found == COMPRESSION_ERROR:
            return  # it may have more updates of the table's size than we take
        if isinstance(found, int) and isinstance(wanted, int):
            return  # refused by both: each may report the damage or the size first
        assert found == wanted, block


@pytest.mark.parametrize("index", [0, 62, 126, 127])
def test_an_index_that_is_in_no_table_is_malformed(index: int) -> None:
    block = bytes([0x80 | index, 0]) if index == 127 else bytes([0x80 | index])
    with pytest.raises(ConnectionFault, match="malformed"):
        FieldDecoder(1000).decode(block)


def test_an_update_of_the_table_behind_a_field_is_malformed() -> None:
    with pytest.raises(ConnectionFault, match="malformed"):
        FieldDecoder(1000).decode(b"\x82\x20\x82")


def test_fields_of_both_readers_are_bounded_together() -> None:
    """The first is usual, and the second is not, whose length has three bytes."""
    block = b"\0\1a\1b" + b"\0\1c" + b"\x7f\xf8\x01" + b"d" * 375
    assert len(FieldDecoder(500).decode(block)) == 2
    with pytest.raises(ConnectionFault, match="too large"):
        FieldDecoder(420).decode(block)


def test_a_front_ends_with_the_first_field_that_is_no_index() -> None:
    decoder = FieldDecoder(1000)
    block = b"\x83\x86" + b"\x40\1a\1b" + b"\x82"
    assert decoder.front(block) == ((b":method", b"POST"), (b":scheme", b"http"))
    assert decoder.decode(block, 2) == [(b"a", b"b"), (b":method", b"GET")]


def test_a_front_is_of_the_table_as_it_is_by_now() -> None:
    decoder = FieldDecoder(1000)
    decoder.decode(b"\x40\1a\1b")
    assert decoder.front(b"\xbe") == ((b"a", b"b"),)
    decoder.decode(b"\x40\1c\1d")
    assert decoder.front(b"\xbe\xbf") == ((b"c", b"d"), (b"a", b"b"))
    decoder.decode(b"\x20")  # a table of no size
    with pytest.raises(ConnectionFault, match="malformed"):
        decoder.front(b"\xbe")


@pytest.mark.parametrize("index", [62, 126])
def test_a_front_of_what_is_in_no_table_is_malformed(index: int) -> None:
    with pytest.raises(ConnectionFault, match="malformed"):
        FieldDecoder(1000).front(bytes([0x82, 0x80 | index]))
