"""HTTP/1.1 on a socket: `RequestReader` reads, `Routes` answers, and this class connects the two.

::

    HEAD --its empty line--> BODY --its last byte--> HEAD ...
    BODY --no memory--> waits, unread --memory--> BODY
    HEAD | BODY --too much, too slow, or malformed--> LINGER: answered, everything after it is dropped

A request with a known head and a body in one piece is taken as it is received; most are. `RequestReader` handles the
others. Everything runs on the event loop, without a task, a future, a lock or a log line per request.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from typing import TYPE_CHECKING, cast

from headrace.errors import InvalidArgument, Unavailable
from headrace_hosts.held_bytes import SLOW_S
from headrace_hosts.held_memory import no_memory
from headrace_http.caller_limits import HttpLimits, has_left, unsent_bytes
from headrace_http.exchanges import AnsweringProtocol, Exchange
from headrace_http.message import CONTINUE, HttpRequest, new_request
from headrace_http.request_body import DIRECT_BYTES
from headrace_http.request_head import END, Http2Refused, Malformed, Refused, RequestHead, malformed
from headrace_http.request_reader import RequestReader

if TYPE_CHECKING:
    from headrace_http.open_connections import NativeConnections

log = logging.getLogger(__name__)

_NO_HEAD, _NO_BODY = RequestHead("", "", {}), memoryview(b"")
#: At most this many requests of a connection are taken in one turn of the event loop.
_PER_TURN = 8
#: When memory is short, at most this much of a body is received before its connection asks for more.
_TIGHT_BYTES = 64 * 1024
#: When the turn of the event loop is over, at most this much: the connection then waits for its next turn.
_LATE_BYTES = 4096
_HELD = "the server holds as many bytes of requests and responses as it may (--memory-budget)"
_NO_REST = "no memory for the rest of a request body"


class ConnectionPhase(enum.Enum):
    """The event that a connection waits for."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()
    TAKING = enum.auto()  # the caller must read the answer
    LINGER = enum.auto()


class HttpProtocol(AnsweringProtocol):
    """One connection."""

    def __init__(self, connections: NativeConnections) -> None:
        super().__init__()
        self._connections = connections
        self.dispatch = connections.dispatch
        self._limits: HttpLimits = connections.limits
        self._buffer, self._received = connections.buffer, connections.received
        self._budget = connections.budget
        self._reader = RequestReader(
            connections.limits, connections.head_cache, self._budget.largest_bytes, connections.take
        )
        # The connection
        self._is_taking = False
        self._has_more = False  # than one turn of the loop may take
        self._is_deaf = False  # no further request is read
        self._has_eof = False
        self._is_lingering = False
        self._is_stopping = False
        self._held_bytes = 0
        self._waits = False  # for memory
        self._wanted_bytes = self._allowed_bytes = 0  # the bytes it waits for, and how large the body may grow then
        # Time
        self._has_spoken = False
        self._phase = ConnectionPhase.HEAD
        self._seconds = 0  # in this phase; 0 starts it anew
        self._stall_timer = connections.limits.stall_timer()

    # ------------------------------------------------------------------ the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if not self._connections.add(self):
            self._is_stopping = True  # closes without waiting until the caller has closed its side
            self._refuse(Refused(Unavailable("the server has as many connections as it may have")))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._read_no_more()
        self._cancel()
        self._hold(0)

    def get_buffer(self, sizehint: int) -> memoryview:
        direct = self._reader.direct
        if direct is None:
            return self._buffer
        try:
            tail = direct.tail()
        except MemoryError:
            self._refuse(Refused(no_memory(_NO_REST)))
            return self._buffer
        budget = self._budget
        if budget.is_crowded and self._connections.turn_bytes <= 0:
            return tail[:_LATE_BYTES]
        if budget.is_tight and not self._allowed_bytes:
            return tail[:_TIGHT_BYTES]
        return tail if len(tail) <= budget.turn_bytes else tail[: budget.turn_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._reader
        direct, head = reader.direct, reader.head
        if direct is not None:
            is_whole = direct.advance(nbytes)
            self._grow(direct.held_bytes, direct.missing_bytes)
            if is_whole:
                reader.forget()
                self._take(cast("RequestHead", head), direct.memory)
            elif self._budget.is_crowded:
                connections = self._connections
                connections.spend(nbytes)
                if direct.is_full or nbytes >= _TIGHT_BYTES or connections.turn_bytes <= 0:
                    self._has_more = True  # others have their turn first
                    connections.wait_turn(self._go_on, direct.is_full)
                    self._balance()
            return
        if self._is_deaf:
            return  # dropped
        if not reader.rest and self._exchange is None:
            if head is None:
                begin = self._received.find(END, 0, nbytes) + len(END)
                head = reader.read_head(self._buffer[:begin].tobytes())
                if head is not None:
                    if nbytes == begin + head.body_bytes:
                        self._take(head, memoryview(self._buffer[begin:nbytes].tobytes()))
                        return
                    if nbytes == begin and 0 < head.body_bytes <= DIRECT_BYTES and not head.waits:
                        reader.head, self._seconds = head, 0
                        return
            elif nbytes == head.body_bytes:
                reader.head = None
                self._take(head, memoryview(self._buffer[:nbytes].tobytes()))
                return
        reader.rest += self._buffer[:nbytes]
        self._take_all()

    def eof_received(self) -> bool:
        """Answer a caller that sends no more, and soon detect one that has disconnected."""
        self._has_eof = True
        self._read_no_more()
        if self._exchange is None:
            return False
        self._exchange.closes = True
        self._provoke()
        self._connections.watch_for_reset(self)
        return True

    def pause_writing(self) -> None:
        self._is_writable = False
        self._connections.call_soon(self._note_held)  # after the whole answer is written
        self._balance()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._note_held()
        self.answered()

    # ------------------------------------------------------------------ the host calls

    @property
    def is_idle(self) -> bool:
        return self._exchange is None and self._reader.is_empty

    @property
    def idle_seconds(self) -> int:
        return self._seconds

    @property
    def has_left(self) -> bool:
        return not self._transport.is_closing() and has_left(self._transport.get_extra_info("socket"))

    def stop(self) -> None:
        self._is_stopping = True
        if self._exchange is not None and self._reader.is_empty:
            self._exchange.closes = self._is_deaf = True

    def end_streams(self) -> None:
        if self._stream is not None:
            self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def sweep(self) -> None:
        if self._held_bytes:
            self._note_held()
        phase, moved = self._observe()
        if phase is not self._phase or not self._seconds:
            self._phase, self._seconds = phase, 1
            self._stall_timer.begin(moved)
            return
        self._seconds += 1
        limits, is_too_slow = self._limits, self._stall_timer.is_too_slow(moved)
        if phase is ConnectionPhase.IDLE:
            if 0 < limits.keepalive_timeout_s < self._seconds:
                self._transport.close()
        elif phase is ConnectionPhase.HEAD:
            if 0 < limits.header_timeout_s < self._seconds or self._is_stopping:
                self._give_up()
        elif phase is ConnectionPhase.BODY:
            if is_too_slow or self._is_stopping:
                self._give_up()
        elif phase is ConnectionPhase.TAKING:
            if self._stream is not None and self._stall_timer.moved_bytes:
                self._seconds = 1  # the answer is still being made, and its caller reads
            if is_too_slow or self._seconds > self._connections.taking_s:
                self._connections.give_up(self)
        elif phase is ConnectionPhase.LINGER:
            if self._seconds > limits.linger_s:
                self._transport.abort()
        elif self._has_eof and self.has_left:
            self._transport.abort()

    def _observe(self) -> tuple[ConnectionPhase, int]:
        """Return the phase of the connection, and a count of its bytes so far. Only differences of counts matter."""
        unsent = self._transport.get_write_buffer_size()
        if unsent or self._is_lingering:
            unsent += unsent_bytes(self._transport.get_extra_info("socket"))
            if unsent:
                return ConnectionPhase.TAKING, self._streamed_bytes - unsent
        if self._is_lingering:
            return ConnectionPhase.LINGER, 0
        if self._exchange is not None or (self._waits and not self._is_stopping):
            return ConnectionPhase.ANSWER, 0
        if self._reader.head is not None:
            return ConnectionPhase.BODY, self._reader.body_bytes
        if self._reader.rest or not self._has_spoken:
            return ConnectionPhase.HEAD, len(self._reader.rest)
        return ConnectionPhase.IDLE, 0

    def _give_up(self) -> None:
        if not self._reader.is_empty:
            self._refuse(Refused(InvalidArgument("the request did not arrive in time"), 408))
        else:
            self._transport.close()  # connected, and never sent a byte

    # ------------------------------------------------------------------ reading received bytes

    def _take_all(self) -> None:
        """Take the requests that have arrived, one after the other, as many as one turn of the loop allows."""
        if self._is_taking:
            return
        reader = self._reader
        self._is_taking, taken = True, 0
        try:
            while reader.rest and reader.direct is None and not self._is_full():
                if self._is_deaf:
                    reader.rest.clear()
                    break
                if taken == _PER_TURN:
                    self._has_more = True
                    break
                request = reader.take()
                size = reader.held_bytes if request is None else len(request[1])
                if size > DIRECT_BYTES:
                    self._grow(size, reader.missing_bytes if request is None else 0)
                if request is None:
                    break
                self._take(*request)
                taken += 1
            if reader.expects:
                reader.expects = False
                self._transport.write(CONTINUE)
        except Http2Refused as refused:
            self._read_no_more()
            self._transport.write(refused.frames)
            self._is_lingering, self._seconds = True, 0
        except Refused as refused:
            self._refuse(refused)
        except Malformed as error:
            self._refuse(malformed(error))
        except MemoryError:
            self._refuse(Refused(no_memory(_NO_REST)))
        finally:
            self._is_taking = False
        self._has_more |= reader.has_more
        if self._has_more:
            self._connections.call_soon(self._go_on)
        self._balance()

    def _take(self, head: RequestHead, body: memoryview) -> None:
        """Answer a request that has arrived."""
        self._seconds, self._has_spoken = 0, True
        method, path, headers, raw, _, closes, _, _ = head
        self._is_deaf = closes or (self._is_stopping and not self._reader.rest)
        self._exchange = exchange = Exchange(self, self._is_deaf, head)
        cancel = self.dispatch(new_request((method, path, headers, body, raw, "")), exchange)
        if exchange.reply is None:
            exchange.cancel = cancel

    def _read_no_more(self) -> None:
        self._is_deaf = True
        if self._request_bytes:
            self._connections.release_memory()
        if self._waits:
            self._waits = False
            self._budget.leave(self)
        self._allowed_bytes = 0
        self._reader.forget()

    # ------------------------------------------------------------------ in step

    def _is_full(self) -> bool:
        """True if no further request may be taken."""
        return not self._is_writable or self._exchange is not None or self._waits

    def _go_on(self) -> None:
        """Take the requests that could not be taken before."""
        self._has_more = False
        if self._reader.rest:
            self._take_all()
        else:
            self._balance()

    def _balance(self) -> None:
        """Read only while no received request waits, and the caller reads its answers."""
        is_behind = self._exchange is not None and bool(self._reader.rest)
        wanted = not self._has_more and not is_behind and self._is_writable and not self._waits
        if wanted != self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    # ------------------------------------------------------------------ held bytes

    @property
    def waits_for_peer(self) -> bool:
        return not self._is_writable or (self._exchange is None and not self._waits)

    @property
    def is_slow(self) -> bool:
        return self._seconds > 1 and self._stall_timer.moved_bytes * SLOW_S < self._held_bytes

    def shed(self) -> None:
        if self._is_writable:
            self._refuse(Refused(no_memory(_HELD)))
        else:
            self._connections.give_up(self)

    @property
    def kept_bytes(self) -> int:
        return self._request_bytes

    def proceed(self) -> None:
        self._waits, self._seconds = False, 0
        self._allowed_bytes = self._request_bytes + self._wanted_bytes
        self._hold(self._allowed_bytes)
        if self._budget.is_crowded:
            self._has_more = True
            self._connections.wait_turn(self._go_on, is_long=True)
        else:
            self._go_on()

    def refuse(self, reason: str) -> None:
        self._waits = False
        self._refuse(Refused(no_memory(reason)))

    def _grow(self, body_bytes: int, missing_bytes: int) -> None:
        """Record that ``body_bytes`` of a large body have arrived. If memory is short, ask before more is read."""
        if missing_bytes and body_bytes < self._allowed_bytes:
            return  # it counts as held already
        self._allowed_bytes = 0
        self._hold(body_bytes)
        if missing_bytes and self._budget.is_tight:
            self._waits, self._wanted_bytes = True, missing_bytes
            self._budget.ask(self, missing_bytes, self.is_slow)
            self._balance()

    def _wrote(self) -> None:
        self._hold(0)
        if self._held_bytes:  # it may leave before the transport pauses
            self._connections.call_soon(self._note_held)

    def _hold(self, request_bytes: int) -> None:
        """Record how much of a large request is held, until it is answered."""
        self._request_bytes = request_bytes
        self._note_held()

    def _note_held(self) -> None:
        unread_bytes = self._transport.get_write_buffer_size()
        if not unread_bytes or (unread_bytes <= DIRECT_BYTES and self._is_writable):
            unread_bytes = self._answer_bytes = 0  # the transport does not say when the last bytes are sent
        else:
            unread_bytes = max(unread_bytes, self._answer_bytes)  # its memory is free when the last byte is sent
        self._held_bytes = self._request_bytes + unread_bytes
        self._connections.held.set(self, self._held_bytes)

    # ------------------------------------------------------------------ the end

    def _refuse(self, refused: Refused) -> None:
        """Answer, and read no further request on this connection."""
        head = self._reader.head or _NO_HEAD
        request = HttpRequest(head.method, head.path, head.headers, _NO_BODY, head.raw)
        reply = self._connections.refusal(refused, request)
        self._read_no_more()
        if log.isEnabledFor(logging.DEBUG):
            log.debug("an HTTP request was refused: %s", b"".join(reply.parts).decode(errors="replace")[:1000])
        self._exchange = exchange = Exchange(self, True, _NO_HEAD)
        exchange(reply)

    def _end(self) -> None:
        """Close after the last answer, when the caller has had time to read it.

        Closing with unread bytes in the socket would reset the connection and lose the answer.
        """
        self._reader.forget()
        if self._has_eof or self._is_stopping or not self._transport.can_write_eof():
            self._transport.close()  # over TLS, this waits for the caller's end
            return
        self._is_lingering, self._seconds = True, 0
        self._transport.write_eof()
        self._balance()
