"""The sending half of a connection: frames leave at once, bodies as fast as the peer's windows allow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from headrace_grpc.http2.frames import DEFAULT_FRAME_BYTES, DEFAULT_WINDOW

if TYPE_CHECKING:
    from headrace_grpc.http2.connection_memory import ConnectionMemory
    from headrace_grpc.http2.limits import Limits, Turns
    from headrace_grpc.http2.stream import Stream

Buffer: TypeAlias = "bytes | memoryview"

#: Bytes of one round of writing. After each round, the sender checks that the socket accepts more.
_ROUND_BYTES = 1024 * 1024
#: Rounds in one turn of the loop.
_ROUNDS = 4
#: Estimated cost of a stream that can send nothing.
_CHECK_NS = 500
_HIGH_WATER, _LOW_WATER = 1024 * 1024, 256 * 1024


class Sender:
    """Sends the frames and bodies of one connection. Frames of one turn of the loop leave in one write."""

    def __init__(self, transport: asyncio.Transport, limits: Limits, turns: Turns, memory: ConnectionMemory) -> None:
        transport.set_write_buffer_limits(_HIGH_WATER, _LOW_WATER)
        #: Bytes that the peer allows: on the connection, on a new stream, and in one frame.
        self.window = self.stream_window = DEFAULT_WINDOW
        self.frame_bytes = DEFAULT_FRAME_BYTES
        #: The largest ``send_credit`` that any stream ever had.
        self.most_credit = 0
        #: Answers and DATA frames sent so far. DATA frames under 1 KiB count only at the end of a body.
        self.count = 0
        #: True if the socket accepts more bytes.
        self.is_writable = True
        #: True if so many control frames wait for the socket that the server does not read the peer.
        self.is_backlogged = False
        #: True if the peer has read since the last sweep; bytes of bodies that it took since then.
        self.has_moved = False
        self.moved_bytes = 0
        #: Streams whose body waits for a window or for the socket.
        self.waiting: dict[Stream, None] = {}
        #: The waiting streams that the next `flush` tries to send.
        self._due: dict[Stream, None] | None = None
        self._transport = transport
        self._turns = turns
        self._call_soon = asyncio.get_running_loop().call_soon
        self._outbox: list[Buffer] = []
        self._is_held = self._is_ended = False
        self._round_left = 0
        self._limits = limits
        self._memory = memory
        self._backlog = 0

    def write(self, data: bytes) -> None:
        """Send ``data``, whole frames, at the end of this turn of the loop."""
        self._outbox.append(data)
        if not self._is_held:
            self._is_held = True
            self._call_soon(self.flush)

    def hold(self) -> None:
        """Collect all writes until `flush`."""
        self._is_held = True

    def flush(self) -> None:
        if self._due is not None:
            due, self._due = self._due, None
            self._pump(due)
        self._is_held = False
        self._write_out()

    def end(self) -> None:
        """Send all written bytes and close our side. Later writes, by streams that are dropped, are discarded.

        The socket stays open for reading if it can: closing it at once could lose the bytes that were sent last.
        """
        self.flush()
        self._is_ended = True
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def write_data(self, head: bytes, parts: Sequence[Buffer], size_bytes: int) -> None:
        """Send a DATA frame: its ``head`` and the ``parts`` of its payload, ``size_bytes`` together."""
        self.window -= size_bytes
        self._round_left -= size_bytes
        self.write(head)
        self._outbox.extend(parts)

    def send_soon(self, stream: Stream, size_bytes: int) -> None:
        """Send the queue of ``stream``, of which ``size_bytes`` are new, now or when the windows allow."""
        self._memory.wait(size_bytes)
        self.waiting[stream] = None
        self._pump({stream: None})

    def dequeued(self, size_bytes: int) -> None:
        """Count ``size_bytes`` that waited and were sent or dropped."""
        self.moved_bytes += size_bytes
        self._memory.dequeued(size_bytes)

    def freed(self, size_bytes: int) -> None:
        """Count the memory of ``size_bytes`` no longer: their last byte was passed on or dropped."""
        self._memory.freed(size_bytes, 0 if self.is_writable else self._transport.get_write_buffer_size())

    def mark_due(self, stream: Stream) -> None:
        """Let the next `flush` try to send the queue of ``stream``. The caller ensures that a `flush` follows."""
        if self._due is None:
            self._due = {}
        self._due[stream] = None

    def mark_all_due(self) -> None:
        """Like `mark_due`, for all streams that wait."""
        self._due = self.waiting

    def pump(self) -> None:
        """Send as much as the windows allow, from all streams that wait."""
        self._pump(self.waiting)

    def pause(self) -> None:
        """Stop sending bodies: the transport's buffer is full."""
        self.is_writable = False
        self._memory.freed(0, self._transport.get_write_buffer_size())

    def resume(self) -> None:
        self.is_writable = self.has_moved = True
        self.is_backlogged = False
        self._backlog = 0
        self._memory.freed(0, 0)
        self.pump()
        self.flush()

    def _pump(self, streams: dict[Stream, None]) -> None:
        """Send what the windows allow from ``streams``, one frame of each in turn."""
        waiting, turns = self.waiting, self._turns
        turns.left_ns -= len(streams) * _CHECK_NS
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
        turns.wait_again(self.pump)  # a peer that reads as fast as we write must not keep the loop busy alone

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
