"""HTTP/2 on a socket: the streams of one connection, and how it begins and ends.

::

    PREFACE --24 bytes and SETTINGS--> OPEN --a fault of the peer's--> GOAWAY, deaf, closed
                                       OPEN --shut_down--> GOAWAY, ping, GOAWAY --last call ends--> closed
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import TYPE_CHECKING, Any, cast

from penstock.frontends.http2 import frames
from penstock.frontends.http2.frames import (
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    INTERNAL_ERROR,
    LAST_ID,
    MAX_WINDOW,
    NO_ERROR,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    ConnectionFault,
)
from penstock.frontends.http2.headers import HeaderReader, MalformedHeaders
from penstock.frontends.http2.keepalive import Pings
from penstock.frontends.http2.receiving import Receiver
from penstock.frontends.http2.sending import Sender

if TYPE_CHECKING:
    from penstock.frontends.http2.connections import Connections
    from penstock.frontends.http2.stream import Stream

log = logging.getLogger(__name__)

#: Streams that we have reset, about which the peer may still say something.
_EXCUSED = 1024
#: Eight bytes each, to tell the answers apart.
_GRACE_PING, _KEEPALIVE_PING = b"shutdown", b"keepaliv"
#: For the answer to the first: a peer that is gone must not hold up the end.
_GRACE_SECONDS = 1.0


class Connection(asyncio.BufferedProtocol):
    """One connection. Streams, and the two halves, use what has no underscore."""

    sender: Sender
    _transport: asyncio.Transport

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.limits = connections.limits
        self._service = connections.service
        self._headers: HeaderReader[Any] = HeaderReader(connections.service.interpret, connections.limits)
        self._loop = asyncio.get_running_loop()
        self.streams: dict[int, Stream] = {}
        #: Streams that are open, or for which somebody works.
        self.active = 0
        self.last_id = 0
        self._last_taken = LAST_ID
        self._excused: dict[int, None] = {}
        self._receiver = Receiver(self, connections.scratch)
        # What the sweep looks at
        self._pings = Pings(connections.keepalive, self._loop.time())
        self._is_quiet = False
        self._partial_since = self._unread_since = self._age_ends = inf
        self._idle_frames = self._resets = self._sent_before = 0
        self._is_leaving = self._is_deaf = False

    # ------------------------------------------------------------------ the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        limits = self.limits
        self.sender = Sender(self._transport, limits.backlog_bytes)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self._transport.abort()
            return
        own = (
            (frames.MAX_CONCURRENT_STREAMS, limits.streams),
            (frames.INITIAL_WINDOW_SIZE, limits.stream_window),
            (frames.MAX_FRAME_SIZE, limits.frame_bytes),
            (frames.MAX_HEADER_LIST_SIZE, limits.header_list_bytes),
        )
        window = frames.window_update(0, limits.connection_window - frames.DEFAULT_WINDOW)
        self._transport.write(frames.settings(own) + window)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._transport.close()  # the TLS of Python 3.10 does not notice by itself
        self._drop_all()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._receiver.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._is_quiet = False
        if self._is_deaf:
            return
        self.sender.hold()
        try:
            self._receiver.received(nbytes)
        except ConnectionFault as fault:
            self._fail(fault)
        except Exception:
            log.exception("an HTTP/2 connection failed")
            self._fail(ConnectionFault(INTERNAL_ERROR, "the connection failed inside the server"))
        self.sender.flush()

    def eof_received(self) -> bool:
        """A peer that closes its side has gone: let the transport close, which cancels."""
        return False

    def pause_writing(self) -> None:
        self.sender.pause()

    def resume_writing(self) -> None:
        self.sender.resume()

    @property
    def peer(self) -> str:
        """The address of the other end; empty where that is not known."""
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) and name else ""

    # ------------------------------------------------------------------ streams come and go

    def open(self, id: int, flags: int, block: bytes) -> None:
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
            self.refuse(id, PROTOCOL_ERROR)
            return
        if self.active >= self.limits.streams or id > self._last_taken:
            self.refuse(id, REFUSED_STREAM)
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

    def forget(self, stream: Stream, has_waited: bool) -> None:
        """``stream`` is closed; it may be among those that wait if it ``has_waited``."""
        del self.streams[stream.id]
        if has_waited:
            self.sender.waiting.pop(stream, None)
        if not stream.is_busy:
            self.released()

    def released(self) -> None:
        """A stream is closed, and nobody works for it."""
        self.active -= 1
        if self._is_leaving and not self.active:
            self._leave()

    def refuse(self, id: int, code: int) -> None:
        """Reset a stream that is not open, unless the peer can not know that yet."""
        if id not in self._excused:
            self.sender.write(frames.reset(id, code))
            self.blame(id)

    def blame(self, id: int) -> None:
        """That stream was reset for a fault of the peer's."""
        self.excuse(id)
        self.count_reset()

    def excuse(self, id: int) -> None:
        """The peer may not know yet that we have closed that stream."""
        excused = self._excused
        excused[id] = None
        if len(excused) > _EXCUSED:
            del excused[next(iter(excused))]

    # ------------------------------------------------------------------ the receiver calls

    def count_idle(self) -> None:
        """A frame that need not have been sent. Answers allow for window updates and pings."""
        self._idle_frames += 1
        if self._idle_frames > self.limits.idle_frames + 4 * (self.sender.count - self._sent_before):
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many frames without a use")

    def count_reset(self) -> None:
        """A stream that ended early by the peer's doing."""
        self._resets += 1
        if self._resets > self.limits.resets:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many streams were reset")

    def ping_received(self, payload: bytes) -> None:
        self.sender.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        now, keepalive = self._loop.time(), self._connections.keepalive
        if self._pings.is_one_too_many(keepalive, now, self.sender.count, bool(self.streams)):
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too_many_pings")

    def ping_answered(self, payload: bytes) -> None:
        if payload == _GRACE_PING and self._is_leaving and self._last_taken == LAST_ID:
            self._last_taken = self.last_id
            self.sender.write(frames.goaway(self.last_id, NO_ERROR))
            if not self.active:
                self._leave()

    def peer_window_changed(self, size: int) -> None:
        """Streams may send ``size`` bytes at first, and those that are open the difference."""
        sender = self.sender
        change, sender.stream_window = size - sender.stream_window, size
        for stream in self.streams.values():
            stream.send_window += change
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "a window exceeds its bound")
        sender.pump()

    # ------------------------------------------------------------------ the host calls

    def shut_down(self) -> None:
        """Take no more streams once the peer knows, answer what is open, then close."""
        if self._is_leaving or self._transport.is_closing():
            return
        self._is_leaving = True
        if not self._receiver.is_greeted:
            self._transport.close()
            return
        # The peer may have opened streams that we have not seen. Its answer to the ping comes after them.
        self.sender.write(frames.goaway(LAST_ID, NO_ERROR) + frames.frame(frames.PING, 0, 0, _GRACE_PING))
        self._loop.call_later(_GRACE_SECONDS, self.ping_answered, _GRACE_PING)

    def abort(self) -> None:
        self._transport.abort()

    def sweep(self, now: float) -> None:
        """Look for what takes too long, and begin to count anew."""
        self._idle_frames = self._resets = 0
        self._sent_before = self.sender.count
        if self._is_deaf or self._is_stuck(now) or self._is_lost(now) or self._is_too_old(now):
            self._transport.abort()

    def _is_stuck(self, now: float) -> bool:
        """Whether the peer does not go on with what it says, or does not read what it asked for."""
        receiver, sender = self._receiver, self.sender
        is_owed = receiver.is_amid and not receiver.has_moved
        self._partial_since = min(self._partial_since, now) if is_owed else inf
        is_read = sender.has_moved or (sender.is_writable and all(stream.is_patient for stream in sender.waiting))
        self._unread_since = inf if is_read else min(self._unread_since, now)
        receiver.has_moved = sender.has_moved = False
        return (
            now - self._partial_since > self.limits.head_seconds
            or now - self._unread_since > self.limits.unread_seconds
        )

    def _is_lost(self, now: float) -> bool:
        """Whether the peer says nothing at all any more; asks it when it is time."""
        keepalive, pings = self._connections.keepalive, self._pings
        if not self._is_quiet:
            self._is_quiet = True
            pings.heard(now)
        if pings.is_due(keepalive, now, self.sender.count, bool(self.streams)):
            self.sender.write(frames.frame(frames.PING, 0, 0, _KEEPALIVE_PING))
        return pings.is_overdue(keepalive, now)

    def _is_too_old(self, now: float) -> bool:
        """Whether its time of grace is over; begins that when it is time."""
        if now >= self._pings.expires:
            self._pings.expires = inf
            self._age_ends = now + self._connections.keepalive.age_grace
            self.shut_down()
        return now >= self._age_ends

    # ------------------------------------------------------------------ the end

    def _fail(self, fault: ConnectionFault) -> None:
        """Say what the peer did wrong, and close once it has had a chance to read that.

        Closing with unread bytes in the socket would reset the connection and lose the words.
        """
        log.debug("an HTTP/2 peer broke a rule: %s", fault.reason)
        self._drop_all()
        self._is_deaf = True
        self.sender.write(frames.goaway(self.last_id, fault.code, fault.reason))
        self.sender.flush()
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _leave(self) -> None:
        """The last call has ended."""
        if self._last_taken != LAST_ID:
            self.sender.flush()
            self._transport.close()

    def _drop_all(self) -> None:
        self._is_leaving = False
        for stream in tuple(self.streams.values()):
            stream.close()
            stream.lost()
