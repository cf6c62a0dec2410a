"""How frames are counted before hypercorn reads them, and how connections share a turn of the event loop."""

from __future__ import annotations

import asyncio
import struct

import pytest

from headrace_hypercorn.http2_frames import IDLE_FRAMES, TURN_COST, FrameCounter, FrameTurns

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, UPDATE = 0, 1, 3, 4, 6, 8
PIECE_FRAMES = 2 * TURN_COST


def frame(kind: int, content: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


@pytest.mark.parametrize("step", [1, 7, 9, 10, 4096, 1 << 20])
def test_frames_are_counted_however_they_arrive(step: int) -> None:
    counter = FrameCounter()
    sent = PREFACE + frame(SETTINGS) + frame(HEADERS, b"h" * 5, 7, 4) + frame(DATA, bytes(3000), 7)
    sent += frame(PING, bytes(8)) * (IDLE_FRAMES - 1)
    pieces = [piece for at in range(0, len(sent), step) for piece in counter.split(sent[at : at + step])]
    assert b"".join(piece for piece, _ in pieces) == sent
    assert not counter.is_flooded()
    counter.split(frame(PING, bytes(8)))
    assert counter.is_flooded()
    assert counter.farewell == frame(7, struct.pack(">II", 7, 11))


@pytest.mark.parametrize(
    ("frames", "most"),
    [
        (frame(PING, bytes(8)), TURN_COST),
        (frame(SETTINGS, bytes(6 * 64)), TURN_COST // 7 + 1),
        (frame(HEADERS, b"h", 1, 4), TURN_COST // 4),
        (frame(DATA, bytes(16384), 1), TURN_COST),
    ],
    ids=["pings", "large settings", "requests", "a body"],
)
def test_a_piece_is_a_few_frames(frames: bytes, most: int) -> None:
    counter = FrameCounter()
    counter.split(PREFACE)
    pieces = counter.split(frames * PIECE_FRAMES)
    assert max(len(piece) for piece, _ in pieces) <= most * len(frames)
    assert all(cost >= TURN_COST for _, cost in pieces[:-1])


def test_frames_with_a_use_do_not_count() -> None:
    counter = FrameCounter()
    counter.split(PREFACE)
    for kind, content, flags in ((HEADERS, b"h", 4), (DATA, b"x", 0), (DATA, b"", 1)):
        counter.split(frame(kind, content, 1, flags) * (IDLE_FRAMES + 1))
    assert not counter.is_flooded()


def test_answers_and_time_allow_further_frames() -> None:
    counter = FrameCounter()
    counter.split(PREFACE + frame(UPDATE, bytes(4)) * IDLE_FRAMES)
    counter.sent(1 << 20)
    counter.answered()
    counter.split(frame(UPDATE, bytes(4)) * (1024 + 8))
    assert not counter.is_flooded()
    counter.renew()
    counter.split(frame(UPDATE, bytes(4)) * IDLE_FRAMES)
    assert not counter.is_flooded()
    counter.split(frame(UPDATE, bytes(4)))
    assert counter.is_flooded()


def test_connections_share_a_turn_in_the_order_in_which_they_ask() -> None:
    served: list[int] = []

    async def connection(turns: FrameTurns, number: int) -> None:
        await turns.spend(TURN_COST)
        served.append(number)

    async def scenario() -> None:
        turns = FrameTurns()
        tasks = [asyncio.ensure_future(connection(turns, number)) for number in range(8)]
        tasks[2].cancel()
        most = 0
        for _ in range(20):
            before = len(served)
            await asyncio.sleep(0)
            most = max(most, len(served) - before)
        assert most == 1
        assert served == [0, 1, 3, 4, 5, 6, 7]
        await asyncio.wait_for(turns.spend(1), 10)  # an idle loop has turns, too

    asyncio.run(scenario())
