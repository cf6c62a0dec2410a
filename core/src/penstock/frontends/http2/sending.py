"""What a connection sends: frames at once, bodies as fast as the peer takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from penstock.frontends.http2.frames import DEFAULT_FRAME_BYTES, DEFAULT_WINDOW

if TYPE_CHECKING:
    from penstock.frontends.http2.stream import Stream

Buffer: TypeAlias = "bytes | memoryview"

#: Written at once before looking whether the socket still takes it.
_ROUND_BYTES = 1024 * 1024
_HIGH_WATER, _LOW_WATER = 1024 * 1024, 256 * 1024


class Sender:
    """The sending half of a connection. What is written within one turn of the loop leaves in one piece."""

    def __init__(self, transport: asyncio.Transport, backlog_bytes: int) -> None:
        """``backlog_bytes`` are written for a peer that does not read, before it is not read either."""
        transport.set_write_buffer_limits(_HIGH_WATER, _LOW_WATER)
        #: What the peer allows: in all, to a new stream, and in one frame.
        self.window = self.stream_window = DEFAULT_WINDOW
        self.frame_bytes = DEFAULT_FRAME_BYTES
        #: Answers and frames of data so far.
        self.count = 0
        #: Whether the socket takes more.
        self.is_writable = True
        #: Whether the peer has read since somebody last looked.
        self.has_moved = False
        #: Streams with a body that may not go, or not yet.
        self.waiting: dict[Stream, None] = {}
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._outbox: list[Buffer] = []
        self._is_held = False
        self._round_left = 0
        self._backlog_bytes = backlog_bytes
        self._backlog = 0
        self._is_reading = True

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
        self._is_held = False
        self._write_out()

    def write_data(self, head: bytes, parts: Sequence[Buffer], size_bytes: int) -> None:
        """Send a frame of data, whose parts add up to ``size_bytes``."""
        self.window -= size_bytes
        self._round_left -= size_bytes
        self.count += 1
        self.write(head)
        self._outbox.extend(parts)

    def send_soon(self, stream: Stream) -> None:
        """Send what waits in ``stream``, now or when it may."""
        self.waiting[stream] = None
        self.pump()

    def pump(self) -> None:
        """Send what may go of what waits, a frame of each stream in turn."""
        waiting = self.waiting
        while waiting and self.is_writable and self.window > 0:
            self._round_left = _ROUND_BYTES
            is_moving = True
            while is_moving and self._round_left > 0:
                is_moving = False
                for stream in tuple(waiting):
                    if stream.send_frame():
                        is_moving = True
                    elif not stream.is_blocked:
                        waiting.pop(stream, None)
            if self._round_left < _ROUND_BYTES:
                self.has_moved = True
            if not is_moving:
                return
            self._write_out()

    def pause(self) -> None:
        """The socket takes no more for now."""
        self.is_writable = False

    def resume(self) -> None:
        self.is_writable = self.has_moved = True
        self._backlog = 0
        self.pump()
        self.flush()
        if not self._is_reading and not self._transport.is_closing():
            self._is_reading = True
            self._transport.resume_reading()

    def _write_out(self) -> None:
        outbox = self._outbox
        if not outbox:
            return
        self._outbox = []
        transport = self._transport
        if transport.is_closing():
            return
        if not self.is_writable:
            self._note_backlog(sum(map(len, outbox)))
        if len(outbox) == 1:
            transport.write(outbox[0])
        else:
            transport.writelines(outbox)

    def _note_backlog(self, size_bytes: int) -> None:
        self._backlog += size_bytes
        if self._backlog > self._backlog_bytes and self._is_reading:
            self._is_reading = False
            self._transport.pause_reading()
