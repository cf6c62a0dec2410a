"""Limits on HTTP/2 frames: of one connection, and of all connections together per turn of the event loop.

A frame costs hypercorn 50 to 500 µs, and a client less than 1 µs. So frames are counted by their heads before hypercorn
reads them. A connection with too many frames without a use ends (CVE-2019-9511 to 9518, CVE-2023-44487).
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from struct import Struct
from typing import NoReturn

from headrace_hypercorn.sockets import has_closed

_HEAD = Struct(">HBBBI")  # the length in 16 and 8 bits, kind, flags, stream
_GOAWAY = Struct(">HBBBIII")  # a head, the last stream, the reason
_PREFACE_BYTES = 24
_DATA, _HEADERS, _GOAWAY_KIND = 0, 1, 7
_END_STREAM = 1
_LAST_ID = 2**31 - 1
_ENHANCE_YOUR_CALM = 11
#: Frames without a use that a connection may send in a second, and further ones for each request that is answered.
IDLE_FRAMES = 1000
_FRAMES_PER_ANSWER = 8
#: Further ones for the bytes of answers: some clients send two WINDOW_UPDATEs for every 4 KiB.
_BYTES_PER_FRAME = 1024
#: What the frames of all connections may cost in one turn of the event loop, and those of one connection at once. A
#: frame costs 1, and 1 more per 64 bytes if it is not DATA. HEADERS cost 4 or more: they begin a request.
TURN_COST = 32
_HEADERS_COST, _BYTES_PER_COST = 4, 64
#: After a flood, at most this many bytes are dropped, for this long, before the connection is closed.
_DROPPED_BYTES, _LINGER_S = 4 << 20, 1.0


class FrameCounter:
    """Splits the frames that one connection receives into pieces of about `TURN_COST`, and counts those without a use.

    These are all but HEADERS, and DATA that has content or ends its stream.
    """

    def __init__(self) -> None:
        self._head = b""
        self._missing = _PREFACE_BYTES  # of a payload
        self._left = IDLE_FRAMES
        self._last_id = 0

    def is_flooded(self) -> bool:
        """True if there are more frames without a use than allowed."""
        return self._left < 0

    @property
    def farewell(self) -> bytes:
        """The GOAWAY for a connection that `is_flooded`."""
        return _GOAWAY.pack(0, 8, _GOAWAY_KIND, 0, 0, self._last_id, _ENHANCE_YOUR_CALM)

    def renew(self) -> None:
        """Allow `IDLE_FRAMES`. Called once per second."""
        self._left = max(self._left, IDLE_FRAMES)

    def answered(self) -> None:
        """Allow more frames, because a request is answered."""
        self._left += _FRAMES_PER_ANSWER

    def sent(self, size_bytes: int) -> None:
        """Allow more frames, because ``size_bytes`` of an answer are sent."""
        self._left += size_bytes // _BYTES_PER_FRAME

    def split(self, data: bytes) -> list[tuple[bytes, int]]:
        """Return the pieces of ``data``, each with its cost. A piece may end within a frame."""
        pieces, begin, cost = [], 0, 1
        at, end = min(self._missing, len(data)), len(data)
        self._missing -= at
        while at < end and self._left >= 0:
            if self._head or end - at < _HEAD.size:
                missing = _HEAD.size - len(self._head)
                self._head += data[at : at + missing]
                at += missing
                if at > end:
                    break
                high, low, kind, flags, number = _HEAD.unpack(self._head)
                self._head = b""
            else:
                high, low, kind, flags, number = _HEAD.unpack_from(data, at)
                at += _HEAD.size
            size = high << 8 | low
            cost += self._count(kind, flags, number, size)
            self._missing = max(0, at + size - end)
            at = min(end, at + size)
            if cost >= TURN_COST:
                pieces.append((data[begin:at], cost))
                begin, cost = at, 0
        if begin < end:
            pieces.append((data[begin:], max(1, cost)))
        return pieces

    def _count(self, kind: int, flags: int, number: int, size: int) -> int:
        """Count a frame. Return its cost."""
        if kind == _DATA:
            if not size and not flags & _END_STREAM:
                self._left -= 1
            return 1
        if kind == _HEADERS:
            self._last_id = number & _LAST_ID
            return _HEADERS_COST + size // _BYTES_PER_COST
        self._left -= 1
        return 1 + size // _BYTES_PER_COST


class FrameTurns:
    """The `TURN_COST` that all connections share in each turn of the event loop. Event loop only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = TURN_COST
        self._is_begun = False
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def spend(self, cost: int) -> None:
        """Return when a turn of the loop has something left, and take ``cost`` of it. First come, first served."""
        if self._waiting or self._left <= 0:
            turn = self._loop.create_future()
            self._waiting.append((cost, turn))
            await turn
            return
        self._left -= cost
        if not self._is_begun:
            self._is_begun = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Begin another turn."""
        self._left = TURN_COST
        while self._waiting and self._left > 0:
            cost, turn = self._waiting.popleft()
            if not turn.done():  # done: the connection has ended
                self._left -= cost
                turn.set_result(None)
        self._is_begun = self._left < TURN_COST
        if self._is_begun:
            self._loop.call_soon(self._begin)


class FrameReader(asyncio.StreamReader):
    """Returns HTTP/2 in pieces of a few frames, when the connection has its turn.

    If the client has disconnected, its frames are dropped: those of a flood would be served for minutes.
    """

    #: The connection, if it speaks HTTP/2.
    transport: asyncio.Transport | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: FrameTurns) -> None:
        super().__init__(loop=loop)
        self.counter = FrameCounter()
        self._turns = turns
        self._pieces: deque[tuple[bytes, int]] = deque()

    async def read(self, n: int = -1) -> bytes:
        if not self._pieces:
            data = await super().read(n)
            if self.transport is None:
                return data
            self._pieces.extend(self.counter.split(data))
            if self.counter.is_flooded():
                await self._refuse(self.transport)
            if not self._pieces:
                return b""
        assert self.transport is not None
        piece, cost = self._pieces.popleft()
        await self._turns.spend(cost)
        if has_closed(self.transport.get_extra_info("socket")):
            self.transport.abort()
        if self.transport.is_closing():
            self._pieces.clear()  # hypercorn keeps this object until garbage is collected
            raise ConnectionResetError("the connection is closed")
        return piece

    def at_eof(self) -> bool:
        return not self._pieces and super().at_eof()

    async def _refuse(self, transport: asyncio.Transport) -> NoReturn:
        """End the connection. For a while, drop what arrives: if it were not read, the client would get a reset."""
        self._pieces.clear()
        transport.write(self.counter.farewell)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drop(), _LINGER_S)
        transport.abort()
        raise ConnectionResetError("too many frames without a use")

    async def _drop(self) -> None:
        left_bytes = _DROPPED_BYTES
        while left_bytes > 0 and (data := await super().read(2**16)):
            left_bytes -= len(data)
