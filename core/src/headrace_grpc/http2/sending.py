"""What a connection sends: frames at once, bodies as fast as the peer takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from headrace_grpc.http2.frames import DEFAULT_FRAME_BYTES, DEFAULT_WINDOW

if TYPE_CHECKING:
    from headrace_grpc.http2.holding import PeerHoldings
    from headrace_grpc.http2.limits import Limits, Turns
    from headrace_grpc.http2.stream import Stream

Buffer: TypeAlias = "bytes | memoryview"

#: Written at once before looking whether the socket still takes it.
_ROUND_BYTES = 1024 * 1024
#: So many of these in one turn of the loop.
_ROUNDS = 4
#: What it costs to see that a stream may send nothing.
_LOOK_NS = 500
_HIGH_WATER, _LOW_WATER = 1024 * 1024, 256 * 1024


class Sender:
    """The sending half of a connection. What is written within one turn of the loop leaves in one piece."""

    def __init__(self, transport: asyncio.Transport, limits: Limits, turns: Turns, holding: PeerHoldings) -> None:
        transport.set_write_buffer_limits(_HIGH_WATER, _LOW_WATER)
        #: What the peer allows: in all, to a new stream, and in one frame.
        self.window = self.stream_window = DEFAULT_WINDOW
        self.frame_bytes = DEFAULT_FRAME_BYTES
        #: No stream's ``send_credit`` was ever larger.
        self.most_credit = 0
        #: Answers and frames of data so far, those left out that are too small to be of use.
        self.count = 0
        #: Whether the socket takes more.
        self.is_writable = True
        #: Whether so much waits for the socket that the peer is not read.
        self.is_backlogged = False
        #: Whether the peer has read since somebody last looked, and how many of these bytes.
        self.has_moved = False
        self.moved_bytes = 0
        #: Streams with a body that may not go, or not yet.
        self.waiting: dict[Stream, None] = {}
        #: Of these, the ones to be looked at before the next `flush`.
        self._due: dict[Stream, None] | None = None
        self._transport = transport
        self._turns = turns
        self._call_soon = asyncio.get_running_loop().call_soon
        self._outbox: list[Buffer] = []
        self._is_held = self._is_ended = False
        self._round_left = 0
        self._limits = limits
        self._holding = holding
        self._backlog = 0

    def write(self, data: bytes) -> None:
        """Send ``data``, whole frames, at the end of this turn of the loop."""
        self._outbox.append(data)
        if not self._is_held:
            self._is_held = True
            self._call_soon(self.flush)

    def hold(self) -> None:
        """Collect what is written until `flush`."""
        self._is_held = True

    def flush(self) -> None:
        if self._due is not None:
            due, self._due = self._due, None
            self._pump(due)
        self._is_held = False
        self._write_out()

    def end(self) -> None:
        """Send what was written, and nothing that streams still write as they are dropped one after the other.

        The peer can read up to here; closing at once could lose it.
        """
        self.flush()
        self._is_ended = True
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def write_data(self, head: bytes, parts: Sequence[Buffer], size_bytes: int) -> None:
        """Send a frame of data, whose parts add up to ``size_bytes``."""
        self.window -= size_bytes
        self._round_left -= size_bytes
        self.write(head)
        self._outbox.extend(parts)

    def send_soon(self, stream: Stream, size_bytes: int) -> None:
        """Send what waits in ``stream``, of which ``size_bytes`` are new, now or when it may."""
        self._holding.wait(size_bytes)
        self.waiting[stream] = None
        self._pump({stream: None})

    def gone(self, size_bytes: int) -> None:
        """So much of what waited has been sent, or will not be."""
        self.moved_bytes += size_bytes
        self._holding.gone(size_bytes)

    def due(self, stream: Stream) -> None:
        """Look at ``stream`` before the next `flush`, which the caller sees to: it may send more."""
        if self._due is None:
            self._due = {}
        self._due[stream] = None

    def all_due(self) -> None:
        """The same for all that wait."""
        self._due = self.waiting

    def pump(self) -> None:
        """Send what may go of what waits."""
        self._pump(self.waiting)

    def pause(self) -> None:
        """The socket takes no more for now."""
        self.is_writable = False

    def resume(self) -> None:
        self.is_writable = self.has_moved = True
        self.is_backlogged = False
        self._backlog = 0
        self.pump()
        self.flush()

    def _pump(self, streams: dict[Stream, None]) -> None:
        """Send what may go of ``streams``, a frame of each in turn."""
        waiting, turns = self.waiting, self._turns
        turns.left_ns -= len(streams) * _LOOK_NS
        for _ in range(_ROUNDS):
            if not (streams and self.is_writable and self.window > 0):
                return
            self._round_left = _ROUND_BYTES
            is_moving = True
            while is_moving and self._round_left > 0 and self.window > 0:
                is_moving = False
                for stream in tuple(streams):
                    if stream.send_frame():
                        is_moving = True
                    elif not stream.is_blocked:
                        waiting.pop(stream, None)
            if self._round_left < _ROUND_BYTES:
                self.has_moved = True
            turns.left_ns -= _ROUND_BYTES - self._round_left
            if not is_moving:
                return
            self._write_out()
        turns.wait_again(self.pump)  # a peer that reads as fast as we write would keep the loop for itself

    def _write_out(self) -> None:
        outbox = self._outbox
        if not outbox:
            return
        self._outbox = []
        transport = self._transport
        if self._is_ended or transport.is_closing():
            return
        if not self.is_writable:
            self._note_backlog(sum(map(len, outbox)))
        if len(outbox) == 1:
            transport.write(outbox[0])
        else:
            transport.writelines(outbox)

    def _note_backlog(self, size_bytes: int) -> None:
        self._backlog += size_bytes
        if self._backlog > self._limits.backlog_bytes and not self.is_backlogged:
            self.is_backlogged = True
            self._transport.pause_reading()
