"""HTTP/1.1 on a socket: `parse_head` reads, `Routes` answers, this class keeps the two in step.

::

    HEAD --its empty line--> BODY --its last byte--> HEAD ...
    HEAD | BODY --too much, too slow, or malformed--> LINGER: answered, nothing is read any more but thrown away

A request whose head came before and whose body comes in one piece is taken as it is received: most requests are
such. What is more, or less, is gathered in ``_rest`` and taken from there, one request after the other. Bodies of
known length are received where their tensors will be read. Everything runs on the event loop, without a task, a
future, a lock or a log line per request.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from headrace.errors import Unavailable
from headrace.frontends.http.body import DIRECT_BYTES, DirectBody
from headrace.frontends.http.chunked import ChunkedBody
from headrace.frontends.http.chunked_answer import ChunkedAnswer
from headrace.frontends.http.exchange import Exchange
from headrace.frontends.http.fields import Malformed
from headrace.frontends.http.limits import Limits, too_many_chunks
from headrace.frontends.http.message import HEADER_LENGTH, Buffer, HttpReply, HttpRequest, error_reply, text_error
from headrace.frontends.http.pace import Pace, has_left, reset, unsent_bytes
from headrace.frontends.http.request_head import (
    CHUNKED,
    END,
    Refused,
    RequestHead,
    drop_empty_lines,
    head_end,
    malformed,
    parse_head,
)
from headrace.frontends.http.writing import BEGINNING, CONTINUE, serialise
from headrace.frontends.uploads import host_of

if TYPE_CHECKING:
    from headrace.frontends.http.connections import Connections

log = logging.getLogger(__name__)

_NO_BODY = memoryview(b"")
_NO_HEAD = RequestHead("", "", {}, ())
#: Requests of one connection that are taken in one turn of the event loop.
_PER_TURN = 8
#: From here on the parts of a reply are written one after the other. ``writelines`` of Python 3.11 joins them and
#: copies them twice more: a tenth of a second for 32 MiB, in which nobody else is served.
_JOINED_BYTES = 1 << 20


class Phase(enum.Enum):
    """What a connection is waiting for."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()
    TAKING = enum.auto()  # of what was answered, by the caller
    LINGER = enum.auto()


class HttpProtocol(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._dispatch = connections.dispatch
        self._limits: Limits = connections.limits
        self._scratch, self._received = connections.scratch, connections.received
        self._find_head = connections.head_cache.find
        self._exchanges: deque[Exchange] = deque()
        self._streams: dict[Exchange, ChunkedAnswer] = {}  # answers that are being made
        self._streamed_bytes = 0
        self._transport: asyncio.Transport
        # The request that is arriving
        self._rest = bytearray()  # received, and not taken yet
        self._searched = 0  # so much of it has no end of a head
        self._head: RequestHead | None = None  # whose body is arriving
        self._direct: DirectBody | None = None
        self._chunked: ChunkedBody | None = None
        self._chunked_bytes = 0  # that have arrived in chunks
        self._empty_lines = 0
        # The connection
        self._is_taking = False
        self._has_more = False  # than one turn of the loop may take
        self._is_deaf = False  # no further request is read
        self._has_eof = False
        self._is_lingering = False
        self._is_reading = True
        self._is_writable = True
        self._is_stopping = False
        self._has_begun = False  # the answer that is next has been begun
        # Time
        self._has_spoken = False
        self._phase = Phase.HEAD
        self._seconds = 0  # of this phase; 0 begins it anew
        self._pace = Pace(connections.limits.min_data_rate, connections.limits.stall_timeout_s)

    # ------------------------------------------------------------------ the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if not self._connections.add(self):
            self._is_stopping = True  # so nobody waits until the caller has closed its side
            self._refuse(error_reply(Unavailable("the server has as many connections as it may have")))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._is_deaf = True
        self._forget()
        exchanges, self._exchanges = self._exchanges, deque()
        for exchange in exchanges:
            if exchange.cancel is not None and exchange.reply is None:
                exchange.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch if self._direct is None else self._direct.tail()

    def buffer_updated(self, nbytes: int) -> None:
        direct, head = self._direct, self._head
        if direct is not None:
            if direct.advance(nbytes):
                self._forget()
                self._take(cast("RequestHead", head), direct.memory)
            return
        if self._is_deaf:
            return  # thrown away
        if not self._rest:
            if head is None:
                begin = self._received.find(END, 0, nbytes) + len(END)
                head = self._find_head(self._scratch[:begin].tobytes())
                if head is not None:
                    if nbytes == begin + head.body_bytes:
                        self._take(head, memoryview(self._scratch[begin:nbytes].tobytes()))
                        return
                    if nbytes == begin and 0 < head.body_bytes <= DIRECT_BYTES and not head.waits:
                        self._head, self._seconds = head, 0
                        return
            elif nbytes == head.body_bytes:
                self._head = None
                self._take(head, memoryview(self._scratch[:nbytes].tobytes()))
                return
        self._rest += self._scratch[:nbytes]
        self._take_all()

    def eof_received(self) -> bool:
        """A caller who will say no more is answered; one who has gone altogether is noticed by `sweep`."""
        self._is_deaf = self._has_eof = True
        self._forget()
        if not self._exchanges:
            return False
        self._exchanges[-1].closes = True
        if self._is_writable and not self._has_begun:
            # Whoever has gone answers what is written now with a reset.
            stream = self._streams.get(self._exchanges[0])
            if stream is not None and stream.has_begun:
                stream.provoke()
            else:
                self._has_begun = True
                self._transport.write(BEGINNING)
        return True

    def pause_writing(self) -> None:
        self._is_writable = False
        self._balance()

    def resume_writing(self) -> None:
        self._is_writable = True
        self.answered()

    # ------------------------------------------------------------------ the host calls

    def answered(self) -> None:
        """An exchange has its reply: write what is in turn, for as long as the caller takes it."""
        exchanges = self._exchanges
        while exchanges and self._is_writable:
            exchange = exchanges[0]
            reply = exchange.reply
            if reply is None:
                if self._streams and (stream := self._streams.get(exchange)) is not None:
                    stream.wake()
                break
            exchanges.popleft()
            buffers = serialise(reply, exchange.closes, exchange.head.method == "HEAD")
            if self._has_begun:
                self._has_begun = False
                buffers[0] = buffers[0][len(BEGINNING) :]
            if len(buffers) == 1:
                self._transport.write(buffers[0])
            elif sum(map(len, buffers)) < _JOINED_BYTES:
                self._transport.writelines(buffers)
            else:
                for buffer in buffers:
                    self._transport.write(buffer)
            if exchange.closes:
                self._end()
                return
        if not self._is_reading:
            self._go_on()

    def begin_stream(self, exchange: Exchange, head: HttpReply) -> ChunkedAnswer:
        """Have ``exchange`` answered in pieces, once those before it are answered."""
        stream = self._streams[exchange] = ChunkedAnswer(self, exchange, head)
        return stream

    def may_stream(self, exchange: Exchange) -> bool:
        """Whether a piece of the answer to ``exchange`` may be written now."""
        return self._is_writable and bool(self._exchanges) and self._exchanges[0] is exchange

    def write_stream(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self._streamed_bytes += len(buffer)
            if self._has_begun:
                self._has_begun = False
                buffer = buffer[len(BEGINNING) :]
            self._transport.write(buffer)

    def end_stream(self, exchange: Exchange) -> None:
        """``exchange``, whose turn it was, has its whole answer."""
        del self._streams[exchange]
        self._exchanges.popleft().cancel = None
        if exchange.closes:
            self._end()
        else:
            self.answered()

    def break_off(self, *, is_plain: bool) -> None:
        """Close behind what is written of an answer that will not be whole."""
        self._is_deaf = True
        self._forget()
        if is_plain:  # an end would be the end of the answer
            reset(self._transport)
        else:
            self._transport.close()

    @property
    def is_idle(self) -> bool:
        return not self._exchanges and not self._rest and self._head is None

    @property
    def idle_seconds(self) -> int:
        return self._seconds

    @property
    def peer(self) -> str:
        """The address of the other end; empty where that is not known."""
        return host_of(self._transport.get_extra_info("peername"))

    def stop(self) -> None:
        self._is_stopping = True
        if self._exchanges and not self._rest and self._head is None:
            self._exchanges[-1].closes = self._is_deaf = True

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def sweep(self) -> None:
        phase, moved = self._observe()
        if phase is not self._phase or not self._seconds:
            self._phase, self._seconds = phase, 1
            self._pace.begin(moved)
            return
        self._seconds += 1
        limits, is_too_slow = self._limits, self._pace.is_too_slow(moved)
        # Whoever stops the server does not wait for a caller who does nothing.
        is_over = self._is_stopping and not self._pace.moved_bytes
        if phase is Phase.IDLE:
            if 0 < limits.keepalive_timeout_s < self._seconds:
                self._transport.close()
        elif phase is Phase.HEAD:
            if 0 < limits.header_timeout_s < self._seconds or is_over:
                self._give_up()
        elif phase is Phase.BODY:
            if is_too_slow or is_over:
                self._give_up()
        elif phase is Phase.TAKING:
            if is_too_slow:
                self._transport.abort()
        elif phase is Phase.LINGER:
            if self._seconds > limits.linger_s:
                self._transport.abort()
        elif self._has_eof and has_left(self._transport.get_extra_info("socket")):
            self._transport.abort()

    def _observe(self) -> tuple[Phase, int]:
        """What is waited for, and how many bytes of it have been moved, counted from anywhere."""
        unsent = self._transport.get_write_buffer_size()
        if unsent or self._is_lingering:
            unsent += unsent_bytes(self._transport.get_extra_info("socket"))
            if unsent:
                return Phase.TAKING, self._streamed_bytes - unsent
        if self._is_lingering:
            return Phase.LINGER, 0
        if self._exchanges:
            return Phase.ANSWER, 0
        if self._head is not None:
            return Phase.BODY, self._chunked_bytes if self._direct is None else self._direct.received_bytes
        if self._rest or not self._has_spoken:
            return Phase.HEAD, len(self._rest)
        return Phase.IDLE, 0

    def _give_up(self) -> None:
        if self._rest or self._head is not None:
            self._refuse(text_error(408, "the request did not arrive in time"))
        else:
            self._transport.close()  # connected, and never said a word

    # ------------------------------------------------------------------ taking what is received

    def _take_all(self) -> None:
        """Take the requests in ``_rest``, as many as may be in flight and as one turn of the loop allows."""
        if self._is_taking:
            return
        self._is_taking, taken = True, 0
        try:
            while self._rest and self._direct is None and not self._is_full():
                if self._is_deaf:
                    self._rest.clear()
                elif taken == _PER_TURN:
                    self._has_more = True
                    break
                elif not (self._take_head() if self._head is None else self._take_body(self._head)):
                    break
                taken += self._head is None
        except Refused as refused:
            self._refuse(refused.reply)
        except Malformed as error:
            self._refuse(malformed(error))
        finally:
            self._is_taking = False
        self._has_more |= self._chunked is not None and self._chunked.has_more
        if self._has_more:
            self._connections.call_soon(self._go_on)
        self._balance()

    def _take_head(self) -> bool:
        """Whether there was a whole head, behind empty lines or not."""
        rest = self._rest
        self._empty_lines += drop_empty_lines(rest)
        if self._empty_lines > self._limits.head_bytes:
            raise Malformed("there are too many empty lines")
        end = head_end(rest, self._searched, self._limits.head_bytes)
        if not end:
            self._searched = len(rest)
            return False
        with memoryview(rest) as view:
            raw = view[:end].tobytes()
        del rest[:end]
        self._searched = self._empty_lines = 0
        head = self._find_head(raw)
        if head is None:
            head = parse_head(raw, self._limits.headers)
            self._connections.head_cache.keep(raw, head)
        if head.body_bytes:
            self._expect_body(head)
        else:
            self._take(head, _NO_BODY)
        return True

    def _expect_body(self, head: RequestHead) -> None:
        """Make room for a body, or refuse it."""
        size = head.body_bytes
        if size > DIRECT_BYTES or size == CHUNKED:
            limit = self._limits.body_limit(head.path, head.headers)
            if size > limit:
                raise Refused(error_reply(self._limits.body_refusal(size, head.path, head.headers)))
        self._head, self._seconds = head, 0
        if head.waits and not self._rest and not self._exchanges:
            self._transport.write(CONTINUE)
        if size == CHUNKED:
            self._chunked = ChunkedBody(
                self._limits, lambda size, chunks: self._judge_chunks(size, chunks, limit, head)
            )
        elif size > DIRECT_BYTES and size > len(self._rest):
            self._receive_directly(head)

    def _judge_chunks(self, size: int, chunks: int, limit: int, head: RequestHead) -> None:
        if chunks > self._limits.chunks:
            raise Refused(error_reply(too_many_chunks(self._limits.chunks)))
        if size > limit:
            raise Refused(error_reply(self._limits.body_refusal(size, head.path, head.headers)))

    def _take_body(self, head: RequestHead) -> bool:
        """Whether there was a whole body."""
        rest = self._rest
        if self._chunked is not None:
            before = len(rest)
            is_whole = self._chunked.feed(rest)
            self._chunked_bytes += before - len(rest)
            if is_whole:
                body, self._head, self._chunked = self._chunked.body, None, None
                self._take(head, memoryview(body))
            return is_whole
        if len(rest) < head.body_bytes:
            self._receive_directly(head)
            return False
        whole = bytes(rest[: head.body_bytes])
        del rest[: head.body_bytes]
        self._head = None
        self._take(head, memoryview(whole))
        return True

    def _receive_directly(self, head: RequestHead) -> None:
        """Have the socket write the rest of the body to where it will be read."""
        text = head.headers.get(HEADER_LENGTH, b"0")
        json_bytes = int(text) if text.isdigit() and len(text) < 12 else 0
        try:
            direct = DirectBody(head.body_bytes, json_bytes)
        except MemoryError:
            raise Refused(
                error_reply(Unavailable(f"no memory for a request body of {head.body_bytes} bytes"))
            ) from None
        direct.append(self._rest)
        self._rest.clear()
        self._direct = direct

    def _take(self, head: RequestHead, body: memoryview) -> None:
        """Have a request answered that has arrived."""
        self._seconds, self._has_spoken = 0, True
        self._is_deaf = head.closes or self._is_stopping
        exchange = Exchange(self, self._is_deaf, head)
        self._exchanges.append(exchange)
        request = HttpRequest(head.method, head.path, head.headers, body, head.raw_headers)
        cancel = self._dispatch(request, exchange)
        if exchange.reply is None:
            exchange.cancel = cancel
        if len(self._exchanges) >= self._limits.in_flight:
            self._balance()

    def _forget(self) -> None:
        """Throw away what has arrived of a request."""
        self._rest.clear()
        self._head = self._direct = self._chunked = None
        self._searched = 0

    # ------------------------------------------------------------------ in step

    def _is_full(self) -> bool:
        return not self._is_writable or len(self._exchanges) >= self._limits.in_flight

    def _go_on(self) -> None:
        """Take what could not be taken before."""
        self._has_more = False
        if self._rest:
            self._take_all()
        else:
            self._balance()

    def _balance(self) -> None:
        """Read on only while answers go out as fast as requests come in."""
        wanted = not self._has_more and not self._is_full()
        if wanted != self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    # ------------------------------------------------------------------ the end

    def _refuse(self, reply: HttpReply) -> None:
        """Answer after those in turn and read no further request on this connection."""
        self._is_deaf = True
        self._forget()
        if log.isEnabledFor(logging.DEBUG):
            log.debug("an HTTP request was refused: %s", b"".join(reply.parts).decode(errors="replace")[:1000])
        exchange = Exchange(self, True, _NO_HEAD)
        self._exchanges.append(exchange)
        exchange(reply)

    def _end(self) -> None:
        """Close behind the last answer, once the caller has had a chance to read it.

        Closing with unread bytes in the socket would reset the connection and lose the answer.
        """
        self._exchanges.clear()
        self._forget()
        if self._has_eof or self._is_stopping:
            self._transport.close()
            return
        self._is_lingering, self._seconds = True, 0
        self._transport.write_eof()
        self._balance()
