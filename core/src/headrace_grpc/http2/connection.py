"""HTTP/2 on a socket: the streams of one connection, and how it begins and ends.

::

    PREFACE --24 bytes and SETTINGS--> OPEN --a fault of the peer's--> GOAWAY, deaf, closed
                                       OPEN --shut_down--> GOAWAY, ping, GOAWAY --last call ends--> closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from headrace_grpc.http2 import frames
from headrace_grpc.http2.frames import (
    END_STREAM,
    FLOW_CONTROL_ERROR,
    INTERNAL_ERROR,
    LAST_ID,
    MAX_WINDOW,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    ConnectionFault,
)
from headrace_grpc.http2.headers import HeaderReader, MalformedHeaders
from headrace_grpc.http2.holding import PeerHoldings
from headrace_grpc.http2.lifetime import Lifetime
from headrace_grpc.http2.limits import Allowance
from headrace_grpc.http2.receiving import Receiver
from headrace_grpc.http2.sending import Sender

if TYPE_CHECKING:
    from headrace_grpc.http2.connections import Connections
    from headrace_grpc.http2.stream import Stream

log = logging.getLogger(__name__)

#: Streams that we have reset, about which the peer may still say something.
_EXCUSED = 1024
#: From a peer that goes on after it was told to stop.
_IGNORED_BYTES = 4 * 1024 * 1024
#: So many streams that their peer has left are ended in a row, and what each is taken to cost.
_DROPPED = 16
_DROP_NS = 50_000


class Connection(asyncio.BufferedProtocol):
    """One connection. Streams, the two halves and its `Lifetime` use what has no underscore."""

    sender: Sender
    transport: asyncio.Transport

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.limits = connections.limits
        self._service = connections.service
        self.allowance = Allowance(connections.limits, lambda: self.sender.count)
        self._headers: HeaderReader[Any] = HeaderReader(
            connections.service.interpret,
            connections.service.extend,
            connections.limits,
            self.allowance.count_idle,
        )
        self.streams: dict[int, Stream] = {}
        #: Streams that are open, or for which somebody works.
        self.active = 0
        self._most_streams = connections.limits.streams
        #: True if the stream that is being opened consists of its headers.
        self.is_whole = False
        self.last_id = 0
        #: Of the streams that are still taken when the connection is to end.
        self.last_taken = LAST_ID
        self._excused: dict[int, None] = {}
        self.turns = connections.turns
        self.holding = PeerHoldings(connections.limits, connections.held, self.turns, self._begun, self.fail)
        self.receiver = Receiver(self, connections.scratch, connections.turns)
        #: Whether it waits for a turn, and is not read meanwhile.
        self._is_late = False
        #: Whether nothing has come since the last sweep.
        self.is_quiet = False
        #: Whether it ends with its last stream, and whether the peer is not heard any more.
        self.is_leaving = self.is_deaf = False
        self._ignored = 0
        self.lifetime = Lifetime(self, connections.keepalive)

    # ------------------------------------------------------------------ the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        limits = self.limits
        self.sender = Sender(self.transport, limits, self.turns, self.holding)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self.transport.abort()
            return
        own = (
            (frames.MAX_CONCURRENT_STREAMS, limits.streams),
            (frames.INITIAL_WINDOW_SIZE, limits.stream_window),
            (frames.MAX_FRAME_SIZE, limits.frame_bytes),
            (frames.MAX_HEADER_LIST_SIZE, limits.header_list_bytes),
        )
        window = frames.window_update(0, limits.connection_window - frames.DEFAULT_WINDOW)
        self.transport.write(frames.settings(own) + window)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self.transport.close()  # the TLS of Python 3.10 does not notice by itself
        if self.holding.end():
            self._service.give_back()
        self._drop_all()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.receiver.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.is_quiet = False
        if self.is_deaf:
            self._ignore(nbytes)
            return
        receiver, sender, turns = self.receiver, self.sender, self.turns
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
            self.transport.abort()

    def _wait(self, wait: Callable[[Callable[[], None]], None]) -> None:
        """Let others go first, and leave what more comes in the socket."""
        if not self._is_late:
            self._is_late = True
            self.transport.pause_reading()
            wait(self._go_on)

    def _go_on(self) -> None:
        self._is_late = self.is_quiet = False
        if self.is_deaf or self.transport.is_closing():
            return
        receiver, sender = self.receiver, self.sender
        sender.hold()
        try:
            receiver.go_on()
        except Exception as error:
            self._break(error)
        sender.flush()
        if receiver.has_more and not self.is_deaf:
            self._wait(self.turns.wait_again)
        else:
            self._read_on()

    def _read_on(self) -> None:
        """Read from the socket, unless there is still a reason not to."""
        if not (self._is_late or self.sender.is_backlogged or self.transport.is_closing()):
            self.transport.resume_reading()

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
        name = self.transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) and name else ""

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """What the other end proved itself with, as ``ssl.SSLSocket.getpeercert`` has it; None without."""
        return self.transport.get_extra_info("peercert") or None

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
        if self.active >= self._most_streams or id > self.last_taken:
            self._refuse_one_more(id)
            return
        if flags & END_STREAM:
            self.is_whole = True
        if self.active >= self.holding.most_active and self.holding.is_full:
            stream = self._service.open_held(self, id, meaning)
        else:
            stream = self._service.open(self, id, meaning)
        if flags & END_STREAM:
            self.is_whole = False
            if not stream.is_closed:
                stream.receive(b"", True)

    def _refuse_one_more(self, id: int) -> None:
        """Too many are open, or worked for although the peer has left them, which it can not know."""
        self.sender.write(frames.reset(id, REFUSED_STREAM))
        self.excuse(id)
        if len(self.streams) >= self._most_streams:
            self.allowance.count_fault()

    def _read_trailers(self, id: int, flags: int, block: bytes) -> None:
        self.allowance.count_idle()
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
            self.released(stream)

    def _begun(self) -> int:
        return self.active - len(self.sender.waiting)

    def released(self, stream: Stream) -> None:
        """``stream`` is closed, and nobody works for it."""
        self.active -= 1
        if stream.is_counted:
            self.holding.let_go(stream)
        if self.holding.held_back:
            self.holding.let_begin()
        if self.is_leaving and not self.active:
            self.leave()

    def refuse(self, id: int, code: int) -> None:
        """Reset a stream that is not open, unless the peer can not know that yet."""
        if id not in self._excused:
            self.sender.write(frames.reset(id, code))
            self.blame(id)

    def blame(self, id: int) -> None:
        """That stream was reset for a fault of the peer's."""
        self.excuse(id)
        self.allowance.count_fault()

    def excuse(self, id: int) -> None:
        """The peer may not know yet that we have closed that stream."""
        excused = self._excused
        excused[id] = None
        if len(excused) > _EXCUSED:
            del excused[next(iter(excused))]

    def left(self, id: int) -> None:
        """The peer has reset that stream: it knows that it is closed."""
        self._excused.pop(id, None)

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

    # ------------------------------------------------------------------ the end

    def abort(self) -> None:
        self.transport.abort()

    def _break(self, error: Exception) -> None:
        """Something in what was received can not be dealt with."""
        if not isinstance(error, ConnectionFault):
            log.error("an HTTP/2 connection failed", exc_info=error)
            error = ConnectionFault(INTERNAL_ERROR, "the connection failed inside the server")
        self.fail(error)

    def fail(self, fault: ConnectionFault) -> None:
        """Say what the peer did wrong, and close once it has had a chance to read that.

        Closing with unread bytes in the socket would reset the connection and lose the words.
        """
        log.debug("an HTTP/2 peer broke a rule: %s", fault.reason)
        self._drop_all()
        self.is_deaf = True
        self.sender.write(frames.goaway(self.last_id, fault.code, fault.reason))
        self.sender.end()

    def leave(self) -> None:
        """The last call has ended."""
        if self.last_taken != LAST_ID:
            self.sender.flush()
            self.transport.close()

    def _drop_all(self) -> None:
        """Nobody is there any more. A thousand handlers are not cancelled in one turn of the loop."""
        self.is_leaving = False
        for _ in range(min(_DROPPED, len(self.streams))):
            stream = next(iter(self.streams.values()))
            stream.close()
            stream.lost()
            self.turns.left_ns -= _DROP_NS
        if self.streams:
            self.turns.wait_again(self._drop_all)
