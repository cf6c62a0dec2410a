"""One HTTP/2 connection: its streams, its start and its end.

::

    PREFACE --24 bytes and SETTINGS--> OPEN --the peer breaks a rule--> GOAWAY, input ignored, closed
                                       OPEN --shut_down--> GOAWAY, ping, GOAWAY --last call ends--> closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from headrace_grpc.http2 import frames
from headrace_grpc.http2.connection_memory import ConnectionMemory
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
from headrace_grpc.http2.lifetime import Lifetime
from headrace_grpc.http2.limits import Allowance
from headrace_grpc.http2.receiving import Receiver
from headrace_grpc.http2.sending import Sender

if TYPE_CHECKING:
    from headrace_grpc.http2.connections import Connections
    from headrace_grpc.http2.stream import Stream

log = logging.getLogger(__name__)

#: How many of the closed streams are remembered whose frames the peer may still send.
_TOLERATED = 1024
#: Bytes that are ignored after a GOAWAY for a fault of the peer. Beyond it the connection aborts.
_IGNORED_BYTES = 4 * 1024 * 1024
#: When a connection is lost: streams that are ended in one step, and the estimated cost of each.
_DROPPED = 16
_DROP_NS = 50_000


class Connection(asyncio.BufferedProtocol):
    """One connection, on the event loop. Its public members are for its streams, both halves and its `Lifetime`."""

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
        #: Number of streams that are open or busy.
        self.active = 0
        self._most_streams = connections.limits.streams
        #: True while a stream is opened by a HEADERS frame that ends the request.
        self.is_whole = False
        self.last_id = 0
        #: The last stream id that is accepted when the connection is to end.
        self.last_taken = LAST_ID
        self._tolerated: dict[int, None] = {}
        self.turns = connections.turns
        self.memory = ConnectionMemory(
            connections.limits, connections.held, self.turns, self._begun, self.fail, connections.budget, self._arrives
        )
        self.receiver = Receiver(self, connections.scratch, connections.turns)
        #: True while the connection waits for a turn. Its socket is not read meanwhile.
        self._is_late = False
        #: True if nothing has arrived since the last sweep.
        self.is_quiet = False
        #: True if the connection ends with its last stream; True if input is ignored.
        self.is_leaving = self.ignores_input = False
        self._ignored = 0
        self.lifetime = Lifetime(self, connections.keepalive)

    # ------------------------------------------------------------------ the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        limits = self.limits
        self.sender = Sender(self.transport, limits, self.turns, self.memory)
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
        self.transport.close()  # the TLS transport of Python 3.10 does not close itself
        if self.memory.end():
            self._service.trim_memory()
        self._drop_all()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.receiver.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.is_quiet = False
        if self.ignores_input:
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
        """Discard bytes that a peer sends after its fault. Abort beyond 4 MiB."""
        self.turns.left_ns -= nbytes
        self._ignored += nbytes
        if self._ignored > _IGNORED_BYTES:
            self.transport.abort()

    def _wait(self, wait: Callable[[Callable[[], None]], None]) -> None:
        """Wait for a turn by calling ``wait``. The socket is not read meanwhile."""
        if not self._is_late:
            self._is_late = True
            self.transport.pause_reading()
            wait(self._go_on)

    def _go_on(self) -> None:
        self._is_late = self.is_quiet = False
        if self.ignores_input or self.transport.is_closing():
            return
        receiver, sender = self.receiver, self.sender
        sender.hold()
        try:
            receiver.go_on()
        except Exception as error:
            self._break(error)
        sender.flush()
        if receiver.has_more and not self.ignores_input:
            self._wait(self.turns.wait_again)
        else:
            self._read_on()

    def _read_on(self) -> None:
        """Read the socket again, unless the connection still waits for a turn or for the peer to read."""
        if not (self._is_late or self.sender.is_backlogged or self.transport.is_closing()):
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        """Let the transport close, which cancels the calls: a peer that closes its side is disconnected."""
        return False

    def pause_writing(self) -> None:
        self.sender.pause()

    def resume_writing(self) -> None:
        self.sender.resume()
        self._read_on()

    @cached_property
    def peer(self) -> str:
        """The IP address of the client; empty if it is unknown."""
        name = self.transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) and name else ""

    @cached_property
    def certificate(self) -> Mapping[str, Any] | None:
        """The client's certificate as ``ssl.SSLSocket.getpeercert`` returns it, or None."""
        return self.transport.get_extra_info("peercert") or None

    # ------------------------------------------------------------------ streams

    def open(self, id: int, flags: int, block: bytes) -> None:
        """Open the stream ``id`` with its headers in ``block``; if it is open, read its trailers.

        Raises `ConnectionFault`. A stream that is malformed or one too many is reset.
        """
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
        if self.active >= self.memory.most_active and self.memory.is_full:
            stream = self._service.open_held(self, id, meaning)
        else:
            stream = self._service.open(self, id, meaning)
        if flags & END_STREAM:
            self.is_whole = False
            if not stream.is_closed:
                stream.receive(b"", True)

    def _refuse_one_more(self, id: int) -> None:
        """Refuse a stream because too many are open or busy, or because the connection ends.

        It is a fault only if too many are open: the peer does not count streams that it has reset and that are busy.
        """
        self.sender.write(frames.reset(id, REFUSED_STREAM))
        self.tolerate(id)
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
            if id not in self._tolerated:
                raise ConnectionFault(PROTOCOL_ERROR, "HEADERS on a closed stream")
        elif is_allowed or stream.is_remote_closed:
            stream.receive(b"", True)
        else:
            stream.reset(PROTOCOL_ERROR)

    def forget(self, stream: Stream, has_waited: bool) -> None:
        """Remove ``stream``, which is closed. ``has_waited``: its body may be waiting in the sender."""
        del self.streams[stream.id]
        if has_waited:
            self.sender.waiting.pop(stream, None)
        if not stream.is_busy:
            self.released(stream)

    def _begun(self) -> int:
        return self.active - len(self.sender.waiting)

    def _arrives(self) -> bool:
        return any(each.is_counted and not each.is_remote_closed for each in self.streams.values())

    def released(self, stream: Stream) -> None:
        """Stop counting ``stream``: it is closed and no longer busy."""
        self.active -= 1
        if stream.is_counted:
            self.memory.release(stream)
        if self.memory.held_back:
            self.memory.let_begin()
        if self.is_leaving and not self.active:
            self.leave()

    def refuse(self, id: int, code: int) -> None:
        """Reset a stream that is not open, unless the peer may not know yet that we closed it."""
        if id not in self._tolerated:
            self.sender.write(frames.reset(id, code))
            self.count_fault(id)

    def count_fault(self, id: int) -> None:
        """Count a fault of the peer, for which the stream ``id`` was reset."""
        self.tolerate(id)
        self.allowance.count_fault()

    def tolerate(self, id: int) -> None:
        """Tolerate later frames of the stream ``id``: the peer may not know yet that we closed it."""
        tolerated = self._tolerated
        tolerated[id] = None
        if len(tolerated) > _TOLERATED:
            del tolerated[next(iter(tolerated))]

    def reset_received(self, id: int) -> None:
        """Tolerate no more frames of the stream ``id``: the peer has reset it."""
        self._tolerated.pop(id, None)

    def peer_window_changed(self, size: int) -> None:
        """Set the send window of new streams to ``size`` bytes; open ones change by the difference."""
        sender = self.sender
        sender.stream_window = size
        # The streams are checked only if the largest credit ever could exceed the bound, which is rare.
        if size + sender.most_credit > MAX_WINDOW and any(
            size + stream.send_credit > MAX_WINDOW for stream in self.streams.values()
        ):
            raise ConnectionFault(FLOW_CONTROL_ERROR, "a window exceeds its bound")
        sender.mark_all_due()

    # ------------------------------------------------------------------ the end

    def abort(self) -> None:
        self.transport.abort()

    def _break(self, error: Exception) -> None:
        """End the connection because of ``error``; log it unless it is a fault of the peer."""
        if not isinstance(error, ConnectionFault):
            log.error("an HTTP/2 connection failed", exc_info=error)
            error = ConnectionFault(INTERNAL_ERROR, "the connection failed inside the server")
        self.fail(error)

    def fail(self, fault: ConnectionFault) -> None:
        """Send a GOAWAY with the reason, and ignore all input until the connection closes.

        Closing a socket that has unread bytes would reset the connection, and the GOAWAY could be lost.
        """
        log.debug("an HTTP/2 peer broke a rule: %s", fault.reason)
        self._drop_all()
        self.ignores_input = True
        self.sender.write(frames.goaway(self.last_id, fault.code, fault.reason))
        self.sender.end()
        if not self.sender.is_writable:  # the peer does not read: what waits before the GOAWAY would stay
            self.transport.abort()

    def leave(self) -> None:
        """Close the connection if the final GOAWAY is sent. Called when the last call has ended."""
        if self.last_taken != LAST_ID:
            self.sender.flush()
            self.transport.close()

    def _drop_all(self) -> None:
        """End all streams, 16 in one step: a thousand handlers must not be cancelled in one turn of the loop."""
        self.is_leaving = False
        for _ in range(min(_DROPPED, len(self.streams))):
            stream = next(iter(self.streams.values()))
            stream.close()
            stream.lost()
            self.turns.left_ns -= _DROP_NS
        if self.streams:
            self.turns.wait_again(self._drop_all)
