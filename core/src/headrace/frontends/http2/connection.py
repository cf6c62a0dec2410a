"""HTTP/2 on a socket: the streams of one connection, and how it begins and ends.

::

    PREFACE --24 bytes and SETTINGS--> OPEN --a fault of the peer's--> GOAWAY, deaf, closed
                                       OPEN --shut_down--> GOAWAY, ping, GOAWAY --last call ends--> closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, cast

from headrace.frontends.http2 import frames
from headrace.frontends.http2.frames import (
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
from headrace.frontends.http2.headers import HeaderReader, MalformedHeaders
from headrace.frontends.http2.keepalive import Pings
from headrace.frontends.http2.receiving import Receiver
from headrace.frontends.http2.sending import Sender

if TYPE_CHECKING:
    from headrace.frontends.http2.connections import Connections
    from headrace.frontends.http2.stream import Stream

log = logging.getLogger(__name__)

#: Streams that we have reset, about which the peer may still say something.
_EXCUSED = 1024
#: Eight bytes each, to tell the answers apart.
_GRACE_PING, _KEEPALIVE_PING = b"shutdown", b"keepaliv"
#: From a peer that goes on after it was told to stop.
_IGNORED_BYTES = 4 * 1024 * 1024
#: So many streams that their peer has left are ended in a row, and what each is taken to cost.
_DROPPED = 16
_DROP_NS = 50_000
#: For a peer to read, when the server stops and waits for nothing else.
_HURRY_SECONDS = 0.5
#: For the answer to the first: a peer that is gone must not hold up the end.
_GRACE_SECONDS = 0.5


class Connection(asyncio.BufferedProtocol):
    """One connection. Streams, and the two halves, use what has no underscore."""

    sender: Sender
    _transport: asyncio.Transport

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.limits = connections.limits
        self._service = connections.service
        self._headers: HeaderReader[Any] = HeaderReader(
            connections.service.interpret, connections.limits, self.count_idle
        )
        self._loop = asyncio.get_running_loop()
        self.streams: dict[int, Stream] = {}
        #: Streams that are open, or for which somebody works.
        self.active = 0
        self._most_streams = connections.limits.streams
        self.last_id = 0
        self._last_taken = LAST_ID
        self._excused: dict[int, None] = {}
        self.turns = connections.turns
        self._receiver = Receiver(self, connections.scratch, connections.turns)
        #: Whether it waits for a turn, and is not read meanwhile.
        self._is_late = False
        # What the sweep looks at
        self._pings = Pings(connections.keepalive, self._loop.time())
        self._is_quiet = False
        self._partial_since = self._unread_since = self._age_ends = inf
        self._faults = self._sent_before = 0
        #: So many frames of no use may still come before the next sweep, and more for each answer since `_sent_before`.
        self._idle_left = connections.limits.idle_frames
        self._is_leaving = self._is_deaf = False
        self._stuck_since = inf
        self._looked_at = self._loop.time()
        self._ignored = 0

    # ------------------------------------------------------------------ the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        limits = self.limits
        self.sender = Sender(self._transport, limits, self.turns)
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
            self._ignore(nbytes)
            return
        receiver, sender, turns = self._receiver, self.sender, self.turns
        sender.hold()
        try:
            if turns.left_ns < 0 and turns.is_over():
                receiver.postpone(nbytes)
                self._wait(turns.wait)
            else:
                receiver.received(nbytes)
                if receiver.has_more:
                    self._wait(turns.wait_again)
        except Exception as error:
            self._break(error)
        sender.flush()

    def _ignore(self, nbytes: int) -> None:
        """What a peer sends after its fault, until it has read of that, or has had time enough to."""
        self.turns.left_ns -= nbytes
        self._ignored += nbytes
        if self._ignored > _IGNORED_BYTES:
            self._transport.abort()

    def _wait(self, wait: Callable[[Callable[[], None]], None]) -> None:
        """Let others go first, and leave what more comes in the socket."""
        if not self._is_late:
            self._is_late = True
            self._transport.pause_reading()
            wait(self._go_on)

    def _go_on(self) -> None:
        self._is_late = self._is_quiet = False
        if self._is_deaf or self._transport.is_closing():
            return
        receiver, sender = self._receiver, self.sender
        sender.hold()
        try:
            receiver.go_on()
        except Exception as error:
            self._break(error)
        sender.flush()
        if receiver.has_more and not self._is_deaf:
            self._wait(self.turns.wait_again)
        else:
            self._read_on()

    def _read_on(self) -> None:
        """Read from the socket, unless there is still a reason not to."""
        if not (self._is_late or self.sender.is_backlogged or self._transport.is_closing()):
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """A peer that closes its side has gone: let the transport close, which cancels."""
        return False

    def pause_writing(self) -> None:
        self.sender.pause()

    def resume_writing(self) -> None:
        self.sender.resume()
        self._read_on()

    @property
    def peer(self) -> str:
        """The address of the other end; empty where that is not known."""
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) and name else ""

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """What the other end proved itself with, as ``ssl.SSLSocket.getpeercert`` has it; None without."""
        return self._transport.get_extra_info("peercert") or None

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
        if self.active >= self._most_streams or id > self._last_taken:
            self._refuse_one_more(id)
            return
        if self.sender.is_full:
            stream = self._service.open_held(self, id, meaning)
        else:
            stream = self._service.open(self, id, meaning)
        if flags & END_STREAM:
            stream.receive(b"", True)

    def _refuse_one_more(self, id: int) -> None:
        """Too many are open, or worked for although the peer has left them, which it can not know."""
        self.sender.write(frames.reset(id, REFUSED_STREAM))
        self.excuse(id)
        if len(self.streams) >= self._most_streams:
            self.count_fault()

    def _read_trailers(self, id: int, flags: int, block: bytes) -> None:
        self.count_idle()
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
        self.count_fault()

    def excuse(self, id: int) -> None:
        """The peer may not know yet that we have closed that stream."""
        excused = self._excused
        excused[id] = None
        if len(excused) > _EXCUSED:
            del excused[next(iter(excused))]

    # ------------------------------------------------------------------ the receiver calls

    def count_idle(self, frames: int = 1) -> None:
        """Frames that are of no use by themselves, or as much work. What is answered or left allows for some."""
        self._idle_left -= frames
        if self._idle_left < 0:
            answers = self.sender.count - self._sent_before
            self._sent_before += answers
            self._idle_left += answers * self.limits.frames_per_answer
            if self._idle_left < 0:
                raise ConnectionFault(ENHANCE_YOUR_CALM, "too many frames without a use")

    def count_left(self) -> None:
        """The peer has left a stream. That is its right, and it said more for it than that."""
        self._idle_left += self.limits.frames_per_answer

    def count_fault(self) -> None:
        """A stream that ended early by a fault of the peer's."""
        self._faults += 1
        if self._faults > self.limits.faults:
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
        sender.stream_window = size
        # Nearly never, so that this costs the same for a thousand streams and for one.
        if size + sender.most_credit > MAX_WINDOW and any(
            size + stream.send_credit > MAX_WINDOW for stream in self.streams.values()
        ):
            raise ConnectionFault(FLOW_CONTROL_ERROR, "a window exceeds its bound")
        sender.all_due()

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

    def farewell(self) -> None:
        """The server stops, after `shut_down`: end the streams that nobody has begun to work for."""
        for stream in tuple(self.streams.values()):
            stream.farewell()

    def hurry(self, now: float) -> None:
        """The server stops: do not wait for a peer that has let `_HURRY_SECONDS` pass without reading its answers."""
        if self._is_deaf:
            self._transport.abort()
        sender = self.sender
        is_waited_for = any(stream.is_busy and not stream.is_blocked for stream in self.streams.values())
        if sender.has_moved or is_waited_for or not (sender.waiting or not sender.is_writable):
            sender.has_moved = False
            self._stuck_since = inf
            return
        self._stuck_since = min(self._stuck_since, now)
        if now - self._stuck_since > _HURRY_SECONDS:
            if self._transport.is_closing():
                self._transport.abort()
            self.expel()

    def expel(self) -> None:
        """End all streams, each with what it has to say, and close as soon as that has been read."""
        if self._is_deaf or self._transport.is_closing():
            return
        self._is_leaving, self._last_taken = True, self.last_id
        self.sender.write(frames.goaway(self.last_id, NO_ERROR))
        for stream in tuple(self.streams.values()):
            stream.expel()
        self.sender.flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def sweep(self, now: float) -> None:
        """Look for what takes too long, and begin to count anew."""
        self._faults = 0
        self._idle_left = self.limits.idle_frames
        self._sent_before = self.sender.count
        for stream in tuple(self.streams.values()):
            stream.look(now)
        if self._is_deaf or self._is_stuck(now) or self._is_lost(now) or self._is_too_old(now):
            self._transport.abort()

    def _is_stuck(self, now: float) -> bool:
        """Whether the peer does not go on with what it says, or does not read what it asked for."""
        receiver, sender = self._receiver, self.sender
        is_owed = receiver.is_amid and not receiver.has_moved
        self._partial_since = min(self._partial_since, now) if is_owed else inf
        patience = self.limits.unread_seconds
        if sender.is_full:
            patience /= 10
        due_bytes = sender.unread_bytes * (now - self._looked_at) / patience
        is_read = (sender.has_moved and sender.moved_bytes >= due_bytes) or (sender.is_writable and not sender.waiting)
        self._unread_since = inf if is_read else min(self._unread_since, now)
        receiver.has_moved = sender.has_moved = False
        sender.moved_bytes, self._looked_at = 0, now
        return now - self._partial_since > self.limits.head_seconds or now - self._unread_since > patience

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

    def _break(self, error: Exception) -> None:
        """Something in what was received can not be dealt with."""
        if not isinstance(error, ConnectionFault):
            log.error("an HTTP/2 connection failed", exc_info=error)
            error = ConnectionFault(INTERNAL_ERROR, "the connection failed inside the server")
        self._fail(error)

    def _fail(self, fault: ConnectionFault) -> None:
        """Say what the peer did wrong, and close once it has had a chance to read that.

        Closing with unread bytes in the socket would reset the connection and lose the words.
        """
        log.debug("an HTTP/2 peer broke a rule: %s", fault.reason)
        self._drop_all()
        self._is_deaf = True
        self.sender.write(frames.goaway(self.last_id, fault.code, fault.reason))
        self.sender.end()

    def _leave(self) -> None:
        """The last call has ended."""
        if self._last_taken != LAST_ID:
            self.sender.flush()
            self._transport.close()

    def _drop_all(self) -> None:
        """Nobody is there any more. A thousand handlers are not cancelled in one turn of the loop."""
        self._is_leaving = False
        for _ in range(min(_DROPPED, len(self.streams))):
            stream = next(iter(self.streams.values()))
            stream.close()
            stream.lost()
            self.turns.left_ns -= _DROP_NS
        if self.streams:
            self.turns.wait_again(self._drop_all)
