"""Messages are received as they were sent, cut or packed in any way, and take little more than their bytes."""

from __future__ import annotations

import gzip
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.option_parts import CompressionLevel
from headrace_grpc.message_framing import DEFLATE, GZIP, PREFIX, Compressor, MessageAssembler, inflate
from headrace_grpc.status import INTERNAL, RESOURCE_EXHAUSTED, Status

MIB = 1 << 20
PACK: dict[bytes, Callable[[bytes], bytes]] = {GZIP: gzip.compress, DEFLATE: zlib.compress}


def framed(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


def test_messages_come_out_as_they_went_in() -> None:
    chance = random.Random(3)
    for _ in range(30):
        sizes = [chance.choice([0, 1, 7, 300, 5000]) for _ in range(chance.randrange(1, 400))]
        messages = [chance.randbytes(size) for size in sizes]
        wire, assembler, taken = b"".join(map(framed, messages)), MessageAssembler(), []
        while wire or assembler.complete:
            if wire and chance.random() < 0.6:
                size = chance.choice([1, 4, 100, 3000, 20_000])
                data, wire = wire[:size], wire[size:]
                if assembler.is_coming:  # as a connection writes where the message belongs
                    tail = assembler.tail(len(data))
                    tail[:] = data[: len(tail)]
                    assembler.advance(len(tail))
                    data = data[len(tail) :]
                assembler.append(memoryview(bytearray(data)))
            elif assembler.complete:
                flag, body = assembler.take()
                assert flag == 0
                taken.append(bytes(body))
        assert taken == messages
        assert (assembler.complete_bytes, assembler.is_between) == (0, True)


@pytest.mark.parametrize("size", [7, 16_384])
def test_buffered_message_takes_little_more_memory_than_its_bytes(size: int) -> None:
    assembler, wire = MessageAssembler(), framed(b"xy") * 20_000
    tracemalloc.start()
    for at in range(0, len(wire), size):
        assembler.append(wire[at : at + size])
    traced_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert assembler.complete_bytes == len(wire)
    assert traced_bytes < 1.3 * len(wire)


def test_memory_of_the_connection_is_not_kept() -> None:
    """The buffer that `append` gets is overwritten as soon as it returns."""
    assembler, scratch = MessageAssembler(), bytearray(framed(b"abcd") * 200)
    assembler.append(memoryview(scratch))
    scratch[:] = bytes(len(scratch))
    assert {bytes(assembler.take()[1]) for _ in range(200)} == {b"abcd"}


# ---------------------------------------------------------------------- packed


def refusal(data: bytes, encoding: bytes, limit: int = MIB) -> tuple[int, str]:
    with pytest.raises(Status) as caught:
        inflate(data, encoding, limit)
    return caught.value.code, caught.value.message


@given(st.binary(max_size=3000).map(lambda content: content * 200), st.sampled_from([GZIP, DEFLATE]))
def test_packed_message_is_unpacked_unchanged(content: bytes, encoding: bytes) -> None:
    assert inflate(PACK[encoding](content), encoding, 1 << 30) == content


@pytest.mark.parametrize("encoding", PACK)
@pytest.mark.parametrize("size", [0, 1, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, MIB])
def test_the_limit_is_exact(encoding: bytes, size: int) -> None:
    packed = PACK[encoding](bytes(size))
    assert inflate(packed, encoding, size) == bytes(size)
    if size:
        code, message = refusal(packed, encoding, size - 1)
        assert code == RESOURCE_EXHAUSTED
        assert message.endswith(f"vs. {size - 1})")


@pytest.mark.parametrize("encoding", PACK)
def test_a_bomb_is_given_up_at_the_limit(encoding: bytes) -> None:
    bomb = PACK[encoding](bytes(256 * MIB))
    tracemalloc.start()
    try:
        assert refusal(bomb, encoding)[0] == RESOURCE_EXHAUSTED
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", PACK)
@pytest.mark.parametrize("damage", [
    pytest.param(lambda packed: packed[:-1], id="cut by a byte"),
    pytest.param(lambda packed: packed[: len(packed) // 2], id="cut in half"),
    pytest.param(lambda packed: b"", id="nothing"),
    pytest.param(lambda packed: b"no such thing", id="noise"),
    pytest.param(lambda packed: packed[:-4] + bytes(4), id="a wrong checksum"),
])  # fmt: skip
def test_damaged_message_is_refused(encoding: bytes, damage: Callable[[bytes], bytes]) -> None:
    assert refusal(damage(PACK[encoding](b"content" * 100)), encoding)[0] == INTERNAL


def test_each_encoding_is_itself_only() -> None:
    assert refusal(gzip.compress(b"x"), DEFLATE)[0] == INTERNAL
    assert refusal(zlib.compress(b"x"), GZIP)[0] == INTERNAL


def test_unpacking_takes_time_in_proportion() -> None:
    """A message that does not compress is the worst case: it has as many bytes as its output.

    The best of several tries counts, because new memory from the system takes time, too."""

    def seconds(size: int) -> float:
        packed = zlib.compress(bytes(size), 0)
        began = time.thread_time()
        assert len(inflate(packed, DEFLATE, 1 << 30)) == size
        return time.thread_time() - began

    assert min(seconds(64 * MIB) for _ in range(5)) < 8 * min(seconds(16 * MIB) for _ in range(5)) + 0.1


@pytest.mark.parametrize(("level", "accepts", "chosen"), [
    ("none", {GZIP, DEFLATE}, b""), ("low", {GZIP, DEFLATE}, GZIP), ("medium", {GZIP, DEFLATE}, DEFLATE),
    ("high", {GZIP, DEFLATE}, DEFLATE), ("low", {DEFLATE}, DEFLATE), ("high", {GZIP}, GZIP), ("high", {b"br"}, b""),
    ("high", set(), b""),
])  # fmt: skip
def test_the_encoding_is_one_that_the_client_takes(level: CompressionLevel, accepts: set[bytes], chosen: bytes) -> None:
    compressor = Compressor(level)
    assert compressor.choose(accepts) == chosen
    if chosen:
        content = b"content" * 1000
        unpack = gzip.decompress if chosen == GZIP else zlib.decompress
        packed = compressor.deflate(content, chosen)
        assert unpack(packed) == content
        assert len(packed) < 200
