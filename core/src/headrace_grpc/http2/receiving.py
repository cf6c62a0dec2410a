"""The receiving half of a connection: parses bytes to frames, and passes each frame to its handler or stream.

A large body bypasses the parser: the socket writes it directly to the memory of its stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_grpc.http2 import frames
from headrace_grpc.http2.control_frames import HANDLERS
from headrace_grpc.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    HAS_PRIORITY,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    LAST_ID,
    PADDED,
    PREFACE,
    PROTOCOL_ERROR,
    SETTINGS,
    STREAM_CLOSED,
    ConnectionFault,
)

if TYPE_CHECKING:
    from headrace_grpc.http2.connection import Connection
    from headrace_grpc.http2.limits import Turns
    from headrace_grpc.http2.sending import Buffer
    from headrace_grpc.http2.stream import Stream

#: Payloads up to this size are copied; larger ones are views of the received bytes.
_COPIED_BYTES = 2048
#: If at least this much of a DATA frame is missing, it is received directly into the memory of its stream.
_DIRECT_BYTES = 4096
#: Smaller DATA frames for a stream that is not open count as idle frames. Empty ones always do.
_SMALL_BYTES = 1024
#: The clock is read once per slice of this many bytes. If fewer bytes arrived, the clock is not read: they are
#: estimated to cost `_BYTE_NS` per byte, about the cost of a whole small call.
_SLICE_BYTES = 512
_BYTE_NS = 256


class Receiver:
    """Receives the frames of one connection. Its methods raise `ConnectionFault`."""

    def __init__(self, connection: Connection, scratch: memoryview, turns: Turns) -> None:
        """``scratch`` is the receive buffer. It is free again after each `received`."""
        self._connection = connection
        self._allowance = connection.allowance
        self._turns = turns
        self._limits = connection.limits
        self._streams = connection.streams
        self._scratch = scratch
        self.is_greeted = False
        #: True if a frame was completed since the last sweep.
        self.has_moved = False
        #: True if complete frames wait because the turn of the loop has no time left.
        self.has_more = False
        self._rest = b""
        # The header block that arrives
        self._block: list[bytes] = []
        self._block_id = self._block_flags = 0
        # The DATA frame that arrives
        self._stream: Stream | None = None
        self._left = self._padding_left = 0
        self._ends = self._is_direct = False
        self._uncredited = 0

    @property
    def is_incomplete(self) -> bool:
        """True if the preface, a frame or a header block is incomplete."""
        return bool(self._rest or self._block) or not self.is_greeted

    def buffer(self) -> memoryview:
        """Return the memory for the socket to write to: that of a stream, or the shared buffer."""
        stream = self._stream
        if stream is not None and self._left >= _DIRECT_BYTES and not stream.is_closed and not self._rest:
            tail = stream.tail(self._left)
            if tail is not None:
                self._is_direct = True
                return tail
        self._is_direct = False
        return self._scratch

    def received(self, size_bytes: int) -> None:
        """Parse ``size_bytes`` that the socket has written to `buffer`."""
        if self._is_direct:
            self._turns.left_ns -= size_bytes  # the kernel needs about 1 ns per byte to write them there
            self._tail_received(size_bytes)
        else:
            self._feed(self._rest + self._scratch[:size_bytes])
        if self._uncredited > self._limits.connection_window >> 1:
            self._credit()

    def postpone(self, size_bytes: int) -> None:
        """Keep ``size_bytes`` that the socket has written for `go_on`: the turn of the loop has no time left."""
        if self._is_direct:
            self.received(size_bytes)
        else:
            self._rest += self._scratch[:size_bytes]

    def go_on(self) -> None:
        """Parse the bytes that wait for this turn."""
        self.has_more = False
        rest, self._rest = self._rest, b""
        if rest:
            self._feed(rest)
        if self._uncredited > self._limits.connection_window >> 1:
            self._credit()

    def _feed(self, data: bytes) -> None:
        self._rest = b""
        if self.is_greeted:
            self._parse(data, 0)
        elif data[: len(PREFACE)] != PREFACE[: len(data)]:
            self._connection.abort()  # HTTP/1, or another protocol
        elif len(data) < len(PREFACE) + HEAD_BYTES:
            self._rest = data
        elif data[len(PREFACE) + 3] != SETTINGS:
            raise ConnectionFault(PROTOCOL_ERROR, "SETTINGS must come first")
        else:
            self.is_greeted = True
            self._parse(data, len(PREFACE))

    def _parse(self, data: bytes, at: int) -> None:
        end, streams, unpack, turns = len(data), self._streams, HEAD.unpack_from, self._turns
        if self._left or self._padding_left:
            at = self._continue_data(data, at)
        stay = last = end - HEAD_BYTES
        size = end - at
        is_measured = size > _SLICE_BYTES
        if is_measured:
            self.has_more = False
            stay = min(last, at + _SLICE_BYTES)
            turns.begin()
        else:
            turns.left_ns -= size * _BYTE_NS
        while True:
            while at <= stay:
                high, low, kind, flags, number = unpack(data, at)
                size = high << 8 | low
                begin = at + HEAD_BYTES
                stop = begin + size
                if self._block and kind != CONTINUATION:
                    raise ConnectionFault(PROTOCOL_ERROR, "a header block was not continued")
                if kind == DATA:
                    stream = streams.get(number)
                    if stop <= end and flags <= END_STREAM and stream is not None and size:
                        self._uncredited += size
                        payload: Buffer = data[begin:stop] if size <= _COPIED_BYTES else memoryview(data)[begin:stop]
                        stream.receive(payload, flags == END_STREAM)
                        at = stop
                    elif flags & PADDED and size and begin == end:
                        break
                    else:
                        at = self._begin_data(data, begin, size, flags, number & LAST_ID)
                    continue
                if size > self._limits.control_bytes:
                    self._refuse_size(size)
                if stop > end:
                    break
                if kind == HEADERS and flags & (PADDED | HAS_PRIORITY | END_HEADERS) == END_HEADERS:
                    self._connection.open(number & LAST_ID, flags, data[begin:stop])
                else:
                    self._take(kind, flags, number & LAST_ID, data[begin:stop])
                at = stop
            else:
                if at <= last:  # the end of a slice, but not of the data
                    if self._has_time():
                        stay = min(last, at + _SLICE_BYTES)
                        continue
                    self.has_more = True
            break
        if at < end:
            self._rest = data[at:]
        if at and not self._block:
            self.has_moved = True
        if is_measured:
            turns.spend()

    def _has_time(self) -> bool:
        """True if this turn of the loop has time to parse another slice."""
        turns = self._turns
        turns.spend()
        return not turns.is_crowded and (turns.left_ns >= 0 or not turns.is_over())

    def _take(self, kind: int, flags: int, id: int, payload: bytes) -> None:
        handler = HANDLERS.get(kind)
        if handler is not None:
            self._allowance.count_idle()
            handler(self._connection, flags, id, payload)
        elif kind == HEADERS:
            self._begin_headers(flags, id, payload)
        elif kind == CONTINUATION:
            self._continue_headers(flags, id, payload)
        else:
            self._allowance.count_idle()  # a frame of an unknown kind is ignored

    def _refuse_size(self, size: int) -> None:
        if size > self._limits.frame_bytes:
            raise ConnectionFault(FRAME_SIZE_ERROR, "frame too large")
        raise ConnectionFault(ENHANCE_YOUR_CALM, "frame too large for its kind")

    # ------------------------------------------------------------------ data

    def _begin_data(self, data: bytes, at: int, size: int, flags: int, id: int) -> int:
        """Begin a DATA frame that is padded, empty, incomplete, or of a stream that is not open.

        Return the position in ``data`` after the part of the frame that is there.
        """
        connection = self._connection
        if size > self._limits.frame_bytes:
            self._refuse_size(size)
        if not id or id > connection.last_id:
            raise ConnectionFault(PROTOCOL_ERROR, "DATA on an idle stream")
        self._uncredited += size
        if self._uncredited > self._limits.connection_window:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "the connection's window is exceeded")
        padding = 0
        if flags & PADDED:
            if not size or data[at] >= size:
                raise ConnectionFault(PROTOCOL_ERROR, "padding exceeds the frame")
            padding = data[at]
            at, size = at + 1, size - 1 - padding
        stream = self._streams.get(id)
        if stream is None:
            connection.refuse(id, STREAM_CLOSED)
        elif padding:
            stream.receive_window -= padding + 1
            stream.credit(padding + 1)
        if size < _SMALL_BYTES and (not size or stream is None) and not flags & END_STREAM:
            self._allowance.count_idle()
        self._stream, self._left, self._padding_left = stream, size, padding
        self._ends = bool(flags & END_STREAM)
        if not size and self._ends and stream is not None:
            stream.receive(b"", True)
        return self._continue_data(data, at)

    def _continue_data(self, data: bytes, at: int) -> int:
        """Pass the next part of the current DATA frame to its stream. Return the position in ``data`` after it."""
        if self._left:
            part = memoryview(data)[at : at + self._left]
            at += len(part)
            self._left -= len(part)
            stream = self._stream
            if part and stream is not None and not stream.is_closed:
                stream.receive(part, self._ends and not self._left)
        if not self._left:
            self._stream = None
            skipped = min(self._padding_left, len(data) - at)
            self._padding_left -= skipped
            at += skipped
        return at

    def _tail_received(self, size: int) -> None:
        stream, self._left = self._stream, self._left - size
        ended = self._ends and not self._left
        if not self._left:
            self._stream = None
        if stream is not None and not stream.is_closed:
            stream.receive_tail(size, ended)

    def _credit(self) -> None:
        if self._uncredited > self._limits.connection_window:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "the connection's window is exceeded")
        self._connection.sender.write(frames.window_update(0, self._uncredited))
        self._uncredited = 0

    # ------------------------------------------------------------------ headers

    def _begin_headers(self, flags: int, id: int, payload: bytes) -> None:
        if flags & PADDED:
            if not payload or payload[0] >= len(payload):
                raise ConnectionFault(PROTOCOL_ERROR, "padding exceeds the frame")
            payload = payload[1 : len(payload) - payload[0]]
        if flags & HAS_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._connection.open(id, flags, payload)
        else:
            self._block, self._block_id, self._block_flags = [payload], id, flags

    def _continue_headers(self, flags: int, id: int, payload: bytes) -> None:
        block = self._block
        if not block or self._block_id != id:
            raise ConnectionFault(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block.append(payload)
        self._allowance.count_idle()
        if len(block) > self._limits.continuations or sum(map(len, block)) > self._limits.header_block_bytes:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "header block too large")
        if flags & END_HEADERS:
            self._block = []
            self._connection.open(id, self._block_flags, b"".join(block))
