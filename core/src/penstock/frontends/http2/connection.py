"""HTTP/2 on a socket: takes frames apart, hands their contents to streams, writes what these answer.

::

    PREFACE --24 bytes and SETTINGS--> OPEN --a fault of the peer's--> GOAWAY, closed
                                       OPEN --shut_down--> GOAWAY, ping, GOAWAY --last call ends--> closed

What is written within one turn of the event loop leaves in one piece. A body that is large bypasses
the parser: the socket writes it to where its stream wants it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from penstock.frontends.http2 import frames
from penstock.frontends.http2.control import HANDLERS
from penstock.frontends.http2.frames import (
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
    INTERNAL_ERROR,
    LAST_ID,
    NO_ERROR,
    PADDED,
    PREFACE,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    ConnectionFault,
)
from penstock.frontends.http2.headers import HeaderReader, MalformedHeaders
from penstock.frontends.http2.keepalive import Pings

if TYPE_CHECKING:
    from penstock.frontends.http2.connections import Connections
    from penstock.frontends.http2.stream import Buffer, Stream

log = logging.getLogger(__name__)

#: Payloads up to here are copied out of what was received; larger ones are views of it.
_COPIED_BYTES = 2048
#: From here on the rest of a DATA frame is received straight into its stream's memory.
_DIRECT_BYTES = 4096
#: Written at once before looking whether the socket still takes it.
_ROUND_BYTES = 1024 * 1024
_HIGH_WATER, _LOW_WATER = 1024 * 1024, 256 * 1024
#: Streams that we have reset, about which the peer may still say something.
_EXCUSED = 1024
#: Eight bytes each, to tell the answers apart.
_GRACE_PING, _KEEPALIVE_PING = b"shutdown", b"keepaliv"
#: For the answer to the first: a peer that is gone must not hold up the end.
_GRACE_SECONDS = 1.0


class Connection(asyncio.BufferedProtocol):
    """One connection. Streams use what has no underscore."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.limits = limits = connections.limits
        self._service = connections.service
        self._headers: HeaderReader[Any] = HeaderReader(connections.service.interpret, limits)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self.streams: dict[int, Stream] = {}
        #: Streams that are open, or for which somebody works.
        self.active = 0
        #: Answers and frames of data that were sent so far.
        self.sent = 0
        # What the peer allows
        self.peer_window = self.send_window = frames.DEFAULT_WINDOW
        self.peer_frame_bytes = frames.DEFAULT_FRAME_BYTES
        # Receiving
        self._scratch = connections.scratch
        self._rest = b""
        self._is_greeted = False
        self._block: list[bytes] = []
        self._block_head = (0, 0)
        self._data_stream: Stream | None = None
        self._data_left = self._padding_left = 0
        self._data_ends = self._is_direct = False
        self._uncredited = 0
        self.last_id = 0
        self._last_taken = LAST_ID
        self._excused: dict[int, None] = {}
        # Sending
        self.is_writable = True
        self._outbox: list[Buffer] = []
        self._is_flushing = False
        self._waiting: dict[Stream, None] = {}
        self._backlog = 0
        self._round_left = 0
        self._is_reading = True
        # What the sweep looks at
        self.pings = Pings(connections.keepalive, self._loop.time())
        self._is_quiet = False
        self._partial_since = self._unread_since = 0.0
        self._idle_frames = self._resets = self._sent_before = 0
        self._is_leaving = self._is_deaf = False
        self._age_ends = 0.0

    # ------------------------------------------------------------------ the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(_HIGH_WATER, _LOW_WATER)
        limits = self.limits
        self._transport.write(
            frames.settings(
                (
                    (frames.MAX_CONCURRENT_STREAMS, limits.streams),
                    (frames.INITIAL_WINDOW_SIZE, limits.stream_window),
                    (frames.MAX_FRAME_SIZE, limits.frame_bytes),
                    (frames.MAX_HEADER_LIST_SIZE, limits.header_list_bytes),
                )
            )
            + frames.window_update(0, limits.connection_window - frames.DEFAULT_WINDOW)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._drop_all()

    def get_buffer(self, sizehint: int) -> memoryview:
        stream = self._data_stream
        if stream is not None and self._data_left >= _DIRECT_BYTES and not stream.is_closed:
            tail = stream.tail(self._data_left)
            if tail is not None:
                self._is_direct = True
                return tail
        self._is_direct = False
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._is_quiet = False
        if self._is_deaf:
            return
        if self._is_direct:
            self._tail_received(nbytes)
        else:
            self._feed(bytes(self._scratch[:nbytes]))

    def eof_received(self) -> bool:
        """A peer that closes its side has gone: let the transport close, which cancels."""
        return False

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        self._backlog = 0
        self._unread_since = 0.0
        self._pump()
        self._flush()
        if not self._is_reading and not self._transport.is_closing():
            self._is_reading = True
            self._transport.resume_reading()

    # ------------------------------------------------------------------ streams call

    def write(self, data: Buffer) -> None:
        """Send ``data``, whole frames, together with whatever else this turn of the loop sends."""
        self._outbox.append(data)
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def write_views(self, views: Sequence[memoryview], size_bytes: int) -> None:
        """The payload of the frame whose head was written last."""
        self._outbox.extend(views)
        self._round_left -= size_bytes

    def send_soon(self, stream: Stream) -> None:
        """Send what waits in ``stream``, now or when it may."""
        self._waiting[stream] = None
        self._pump()

    def forget(self, stream: Stream, has_waited: bool) -> None:
        """``stream`` is closed; it may be among those that wait if it ``has_waited``."""
        del self.streams[stream.id]
        if has_waited:
            self._waiting.pop(stream, None)
        if not stream.is_busy:
            self.released()

    def released(self) -> None:
        """A stream is closed, and nobody works for it."""
        self.active -= 1
        if self._is_leaving and not self.active:
            self._leave()

    def blame(self, stream: Stream) -> None:
        """``stream`` was reset for a fault of the peer's."""
        self.excuse(stream.id)
        self.count_reset()

    def excuse(self, id: int) -> None:
        """The peer may not know yet that we have closed that stream."""
        excused = self._excused
        excused[id] = None
        if len(excused) > _EXCUSED:
            del excused[next(iter(excused))]

    # ------------------------------------------------------------------ the host calls

    def shut_down(self) -> None:
        """Take no more streams once the peer knows, answer what is open, then close."""
        if self._is_leaving or self._transport.is_closing():
            return
        self._is_leaving = True
        if not self._is_greeted:
            self._transport.close()
            return
        # The peer may have opened streams that we have not seen. Its answer to the ping comes after them.
        self.write(frames.goaway(LAST_ID, NO_ERROR) + frames.frame(frames.PING, 0, 0, _GRACE_PING))
        self._loop.call_later(_GRACE_SECONDS, self.ping_answered, _GRACE_PING)

    def abort(self) -> None:
        self._transport.abort()

    def sweep(self, now: float) -> None:
        """Look for what takes too long, and begin to count anew."""
        if self._is_deaf:
            self._transport.abort()
            return
        limits, keepalive, pings = self.limits, self._connections.keepalive, self.pings
        self._idle_frames = self._resets = 0
        self._sent_before = self.sent
        if not self._is_quiet:
            self._is_quiet = True
            pings.heard(now)
        if self._rest or self._block or not self._is_greeted:
            self._partial_since = self._partial_since or now
            if now - self._partial_since > limits.head_seconds:
                self._transport.abort()
        else:
            self._partial_since = 0.0
        if not self.is_writable or not all(stream.is_patient for stream in self._waiting):
            self._unread_since = self._unread_since or now
            if now - self._unread_since > limits.unread_seconds:
                self._transport.abort()
        else:
            self._unread_since = 0.0
        if pings.is_overdue(keepalive, now):
            self._transport.abort()
        elif pings.is_due(keepalive, now, self.sent, bool(self.streams)):
            self.write(frames.frame(frames.PING, 0, 0, _KEEPALIVE_PING))
        if now >= pings.expires and not self._age_ends:
            self._age_ends = now + keepalive.age_grace
            self.shut_down()
        elif self._age_ends and now >= self._age_ends:
            self._transport.abort()

    # ------------------------------------------------------------------ receiving

    def _feed(self, data: bytes) -> None:
        """Take apart ``data``, what was left before it included, and write what it was answered."""
        self._is_flushing = True
        try:
            if self._rest:
                data = self._rest + data
                self._rest = b""
            if self._is_greeted:
                self._parse(data, 0)
            else:
                self._greet(data)
        except ConnectionFault as fault:
            self.fail(fault)
        except Exception:
            log.exception("an HTTP/2 connection failed")
            self.fail(ConnectionFault(INTERNAL_ERROR, "the connection failed inside the server"))
        self._flush()

    def _greet(self, data: bytes) -> None:
        begin = len(PREFACE)
        if data[:begin] != PREFACE[: len(data)]:
            self._transport.abort()  # HTTP/1, or noise
        elif len(data) < begin + HEAD_BYTES:
            self._rest = data
        elif data[begin + 3] != SETTINGS:
            raise ConnectionFault(PROTOCOL_ERROR, "SETTINGS must come first")
        else:
            self._is_greeted = True
            self._parse(data, begin)

    def _parse(self, data: bytes, at: int) -> None:
        end, streams, unpack = len(data), self.streams, HEAD.unpack_from
        if self._data_left or self._padding_left:
            at = self._continue_data(data, at)
        while end - at >= HEAD_BYTES:
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
            if size > self.limits.control_bytes:
                self._refuse_size(size)
            if stop > end:
                break
            if kind == HEADERS and flags & (PADDED | HAS_PRIORITY | END_HEADERS) == END_HEADERS:
                self._open(number & LAST_ID, flags, data[begin:stop])
            else:
                self._control(kind, flags, number & LAST_ID, data[begin:stop])
            at = stop
        if self._uncredited > self.limits.connection_window >> 1:
            self._credit()
        if at < end:
            self._rest = data[at:]
            if not self._block:
                self._partial_since = 0.0

    def _control(self, kind: int, flags: int, id: int, payload: bytes) -> None:
        if kind == HEADERS:
            self._begin_headers(flags, id, payload)
        elif kind == CONTINUATION:
            self._continue_headers(flags, id, payload)
        else:
            self.count_idle()
            handler = HANDLERS.get(kind)
            if handler is not None:
                handler(self, flags, id, payload)

    def _refuse_size(self, size: int) -> None:
        if size > self.limits.frame_bytes:
            raise ConnectionFault(FRAME_SIZE_ERROR, "frame too large")
        raise ConnectionFault(ENHANCE_YOUR_CALM, "frame too large for its kind")

    # ------------------------------------------------------------------ receiving data

    def _begin_data(self, data: bytes, at: int, size: int, flags: int, id: int) -> int:
        """A DATA frame that is padded, empty, not whole yet, or of a stream that is not open."""
        if size > self.limits.frame_bytes:
            self._refuse_size(size)
        if not id or id > self.last_id:
            raise ConnectionFault(PROTOCOL_ERROR, "DATA on an idle stream")
        self._uncredited += size
        if self._uncredited > self.limits.connection_window:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "the connection's window is exceeded")
        padding = 0
        if flags & PADDED:
            if not size or data[at] >= size:
                raise ConnectionFault(PROTOCOL_ERROR, "padding exceeds the frame")
            padding = data[at]
            at, size = at + 1, size - 1 - padding
        stream = self.streams.get(id)
        if stream is None:
            self._data_for_closed(id)
        elif padding:
            stream.receive_window -= padding + 1
            stream.credit(padding + 1)
        if not size:
            self.count_idle()
        self._data_stream, self._data_left, self._padding_left = stream, size, padding
        self._data_ends = bool(flags & END_STREAM)
        if not size and self._data_ends and stream is not None:
            stream.receive(b"", True)
        return self._continue_data(data, at)

    def _continue_data(self, data: bytes, at: int) -> int:
        """Pass on what ``data`` has of the frame that began earlier; the position after it."""
        left = self._data_left
        if left:
            part = memoryview(data)[at : at + left]
            taken = len(part)
            at += taken
            self._data_left = left = left - taken
            stream = self._data_stream
            if taken and stream is not None and not stream.is_closed:
                stream.receive(part, self._data_ends and not left)
        if not left:
            self._data_stream = None
            skipped = min(self._padding_left, len(data) - at)
            self._padding_left -= skipped
            at += skipped
        return at

    def _tail_received(self, size: int) -> None:
        """The socket has written ``size`` bytes of the frame to where they belong."""
        stream, self._data_left = self._data_stream, self._data_left - size
        ended = self._data_ends and not self._data_left
        if not self._data_left:
            self._data_stream = None
        if stream is not None and not stream.is_closed:
            self._is_flushing = True
            stream.receive_tail(size, ended)
            if self._uncredited > self.limits.connection_window >> 1:
                self._credit()
            self._flush()

    def _data_for_closed(self, id: int) -> None:
        if id not in self._excused:
            self.count_reset()
            self.write(frames.reset(id, STREAM_CLOSED))

    def _credit(self) -> None:
        if self._uncredited > self.limits.connection_window:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "the connection's window is exceeded")
        self.write(frames.window_update(0, self._uncredited))
        self._uncredited = 0

    # ------------------------------------------------------------------ receiving headers

    def _begin_headers(self, flags: int, id: int, payload: bytes) -> None:
        if flags & PADDED:
            if not payload or payload[0] >= len(payload):
                raise ConnectionFault(PROTOCOL_ERROR, "padding exceeds the frame")
            payload = payload[1 : len(payload) - payload[0]]
        if flags & HAS_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(FRAME_SIZE_ERROR, "HEADERS without room for their priority")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._open(id, flags, payload)
        else:
            self._block = [payload]
            self._block_head = (id, flags)

    def _continue_headers(self, flags: int, id: int, payload: bytes) -> None:
        block = self._block
        if not block or self._block_head[0] != id:
            raise ConnectionFault(PROTOCOL_ERROR, "CONTINUATION of nothing")
        block.append(payload)
        if len(block) > self.limits.continuations or sum(map(len, block)) > self.limits.header_block_bytes:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "header block too large")
        if flags & END_HEADERS:
            self._block = []
            self._open(id, self._block_head[1], b"".join(block))

    def _open(self, id: int, flags: int, block: bytes) -> None:
        """A stream opens, or has its trailers."""
        if id <= self.last_id:
            self._read_trailers(id, flags, block)
            return
        if not id & 1:
            raise ConnectionFault(PROTOCOL_ERROR, "stream ids must be odd")
        self.last_id = id
        try:
            meaning = self._headers.read(block)
        except MalformedHeaders:
            self._refuse_stream(id, PROTOCOL_ERROR)
            return
        if self.active >= self.limits.streams or id > self._last_taken:
            self._refuse_stream(id, REFUSED_STREAM)
            return
        stream = self._service.open(self, id, meaning)
        if flags & END_STREAM:
            stream.receive(b"", True)

    def _read_trailers(self, id: int, flags: int, block: bytes) -> None:
        stream, is_allowed = self.streams.get(id), bool(flags & END_STREAM)
        try:
            self._headers.read_trailers(block)
        except MalformedHeaders:
            is_allowed = False
        if stream is None:
            if id not in self._excused:
                raise ConnectionFault(PROTOCOL_ERROR, "HEADERS on a closed stream")
        elif is_allowed or stream.is_remote_closed:
            stream.receive(b"", True)
        else:
            stream.reset(PROTOCOL_ERROR)

    def _refuse_stream(self, id: int, code: int) -> None:
        self.count_reset()
        self.excuse(id)
        self.write(frames.reset(id, code))

    # ------------------------------------------------------------------ control frames call

    def count_idle(self) -> None:
        """A frame that need not have been sent. Answers allow for window updates and pings."""
        self._idle_frames += 1
        if self._idle_frames > self.limits.idle_frames + 4 * (self.sent - self._sent_before):
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many frames without a use")

    def count_reset(self) -> None:
        """A stream that ended early by the peer's doing."""
        self._resets += 1
        if self._resets > self.limits.resets:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many streams were reset")

    def ping_received(self, payload: bytes) -> None:
        self.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        now = self._loop.time()
        if self.pings.is_one_too_many(self._connections.keepalive, now, self.sent, bool(self.streams)):
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too_many_pings")

    def ping_answered(self, payload: bytes) -> None:
        if payload == _GRACE_PING and self._is_leaving and self._last_taken == LAST_ID:
            self._last_taken = self.last_id
            self.write(frames.goaway(self.last_id, NO_ERROR))
            if not self.active:
                self._leave()

    def peer_window_changed(self, size: int) -> None:
        change, self.peer_window = size - self.peer_window, size
        for stream in tuple(self.streams.values()):
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "a window exceeds its bound")
        self._pump()

    def window_updated(self, stream: Stream | None) -> None:
        """The connection, or ``stream``, may send more."""
        if stream is None or stream.is_blocked:
            self._pump()

    def fail(self, fault: ConnectionFault) -> None:
        """Say what the peer did wrong, and close once it has had a chance to read that.

        Closing with unread bytes in the socket would reset the connection and lose the words.
        """
        log.debug("an HTTP/2 peer broke a rule: %s", fault.reason)
        self._drop_all()
        self._is_deaf = True
        self._outbox.append(frames.goaway(self.last_id, fault.code, fault.reason))
        self._flush()
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    # ------------------------------------------------------------------ sending

    def _pump(self) -> None:
        """Send what may go of what waits, a frame of each stream in turn."""
        waiting = self._waiting
        while waiting and self.is_writable and self.send_window > 0:
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
                self._unread_since = 0.0
            if is_moving:
                self._write_out()
            else:
                return

    def _flush(self) -> None:
        self._is_flushing = False
        self._write_out()

    def _write_out(self) -> None:
        outbox = self._outbox
        if not outbox:
            return
        self._outbox = []
        transport = self._transport
        if transport.is_closing():
            return
        if not self.is_writable:
            self._hold(sum(map(len, outbox)))
        if len(outbox) == 1:
            transport.write(outbox[0])
        else:
            transport.writelines(outbox)

    def _hold(self, size: int) -> None:
        """The peer does not read, and is still answered: for a while, then it is not read either."""
        self._backlog += size
        if self._backlog > self.limits.backlog_bytes and self._is_reading:
            self._is_reading = False
            self._transport.pause_reading()

    # ------------------------------------------------------------------ the end

    def _leave(self) -> None:
        """The last call has ended."""
        if self._last_taken != LAST_ID:
            self._flush()
            self._transport.close()

    def _drop_all(self) -> None:
        self._is_leaving = False
        for stream in tuple(self.streams.values()):
            stream.close()
            stream.lost()
