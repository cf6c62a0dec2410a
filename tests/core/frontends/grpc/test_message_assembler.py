"""Messages come out as they went in, however they were cut, and what waits takes little more than its bytes."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from headrace.frontends.grpc.message_assembler import PREFIX, MessageAssembler


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
def test_what_waits_takes_little_more_than_its_bytes(size: int) -> None:
    assembler, wire = MessageAssembler(), framed(b"xy") * 20_000
    tracemalloc.start()
    for at in range(0, len(wire), size):
        assembler.append(wire[at : at + size])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert assembler.complete_bytes == len(wire)
    assert held < 1.3 * len(wire)


def test_memory_of_the_connection_is_not_kept() -> None:
    """What `append` is given is read into again as soon as it returns."""
    assembler, scratch = MessageAssembler(), bytearray(framed(b"abcd") * 200)
    assembler.append(memoryview(scratch))
    scratch[:] = bytes(len(scratch))
    assert {bytes(assembler.take()[1]) for _ in range(200)} == {b"abcd"}
