"""Messages come out as they went in, however they were cut, and what waits takes little more than its bytes."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from headrace.frontends.grpc.inbox import PREFIX, Inbox


def framed(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


def test_messages_come_out_as_they_went_in() -> None:
    chance = random.Random(3)
    for _ in range(30):
        sizes = [chance.choice([0, 1, 7, 300, 5000]) for _ in range(chance.randrange(1, 400))]
        messages = [chance.randbytes(size) for size in sizes]
        wire, inbox, taken = b"".join(map(framed, messages)), Inbox(), []
        while wire or inbox.complete:
            if wire and chance.random() < 0.6:
                size = chance.choice([1, 4, 100, 3000, 20_000])
                data, wire = wire[:size], wire[size:]
                if inbox.is_coming:  # as a connection writes where the message belongs
                    tail = inbox.tail(len(data))
                    tail[:] = data[: len(tail)]
                    inbox.advance(len(tail))
                    data = data[len(tail) :]
                inbox.append(memoryview(bytearray(data)))
            elif inbox.complete:
                flag, body = inbox.take()
                assert flag == 0
                taken.append(bytes(body))
        assert taken == messages
        assert (inbox.complete_bytes, inbox.is_between) == (0, True)


@pytest.mark.parametrize("size", [7, 16_384])
def test_what_waits_takes_little_more_than_its_bytes(size: int) -> None:
    inbox, wire = Inbox(), framed(b"xy") * 20_000
    tracemalloc.start()
    for at in range(0, len(wire), size):
        inbox.append(wire[at : at + size])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert inbox.complete_bytes == len(wire)
    assert held < 1.3 * len(wire)


def test_memory_of_the_connection_is_not_kept() -> None:
    """What `append` is given is read into again as soon as it returns."""
    inbox, scratch = Inbox(), bytearray(framed(b"abcd") * 200)
    inbox.append(memoryview(scratch))
    scratch[:] = bytes(len(scratch))
    assert {bytes(inbox.take()[1]) for _ in range(200)} == {b"abcd"}
