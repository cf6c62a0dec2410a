"""HTTP/1.1 on a socket: llhttp reads, `Routes` answers, this class keeps the two in step.

::

    HEAD --headers complete--> BODY --message complete--> HEAD ...      (the parser's states)
    HEAD | BODY --too much, or malformed--> LINGER: answered, nothing is read any more but thrown away

Bodies of known length beyond `DIRECT_BYTES` bypass the parser: the socket writes them to where the
tensors will be read, and the parser is replaced by a new one afterwards. So does a request whose
head is known to the last byte and whose body comes in one piece: most requests are such. Everything
runs on the event loop, without a task, a future, a lock or a log line per request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import httptools

from penstock.errors import InternalError, Unavailable
from penstock.frontends.http.body import DIRECT_BYTES, DirectBody
from penstock.frontends.http.exchange import Exchange
from penstock.frontends.http.heads import END, Head
from penstock.frontends.http.limits import Limits, too_many_chunks
from penstock.frontends.http.message import HEADER_LENGTH, Buffer, HttpReply, HttpRequest, error_reply, text_error
from penstock.frontends.http.writing import CONTINUE, serialise
from penstock.frontends.uploads import host_of

if TYPE_CHECKING:
    from penstock.frontends.http.connections import Connections

log = logging.getLogger(__name__)

_NO_HEAD = Head("", "", {}, ())


class _Refused(Exception):
    """Ends the parser; the reply is in ``_refusal``."""


class HttpProtocol(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._dispatch = connections.dispatch
        self._limits: Limits = connections.limits
        self._scratch, self._received = connections.scratch, connections.received
        self._find_head, self._keep_head = connections.known_heads.find, connections.known_heads.keep
        self._exchanges: deque[Exchange] = deque()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        # What the parser has seen: nothing of a request whose end it has not seen, and how many begin in this read
        self._is_between = True
        self._begun = 0
        # The request that is arriving
        self._awaiting: tuple[bytes, Head] | None = None  # a known head, which the parser has not seen
        self._head = _NO_HEAD
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._raw_headers: list[tuple[bytes, bytes]] = []
        self._body: Buffer = b""
        self._direct: DirectBody | None = None
        self._body_limit = 0
        self._chunks = 0
        self._chunk_is_empty = True
        # The connection
        self._refusal: HttpReply | None = None
        self._in_head = True
        self._is_receiving = True
        self._is_deaf = False  # no further request is read
        self._is_refused = False
        self._is_lingering = False
        self._is_reading = True
        self._is_writable = True
        self._is_stopping = False
        self._loose_bytes = 0
        self._quiet_sweeps = 0
        self._head_sweeps = 0

    # ------------------------------------------------------------------ the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._is_deaf = True
        del self._parser  # which refers to this object
        exchanges, self._exchanges = self._exchanges, deque()
        for exchange in exchanges:
            if exchange.cancel is not None and exchange.reply is None:
                exchange.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch if self._direct is None else self._direct.tail()

    def buffer_updated(self, nbytes: int) -> None:
        self._quiet_sweeps = 0
        if self._direct is None:
            if self._is_deaf or not self._is_between or not self._recognise(nbytes):
                self._feed(self._scratch[:nbytes])
        elif self._direct.advance(nbytes):
            self._parser = httptools.HttpRequestParser(self)
            self.on_message_complete()

    def eof_received(self) -> bool:
        """A caller that closes its side has gone: let the transport close, which cancels."""
        return False

    def pause_writing(self) -> None:
        self._is_writable = False
        self._balance()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._balance()

    # ------------------------------------------------------------------ the parser calls

    def on_message_begin(self) -> None:
        self._is_between = False
        self._begun += 1

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._is_receiving = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which must not change what the head has said
        raw = self._raw_headers
        raw.append((name, value))
        if len(raw) > self._limits.headers:
            self._stop_parsing(text_error(431, f"request has more than {self._limits.headers} headers"))
        name = name.lower()
        headers = self._headers
        headers[name] = value if name not in headers else headers[name] + b", " + value

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._loose_bytes = self._head_sweeps = 0
        headers, parser = self._headers, self._parser
        # HTTP/1.0 would need a header to be kept alive; its callers can do without.
        closes = not parser.should_keep_alive() or (b"connection" in headers and parser.get_http_version() == "1.0")
        announced = headers.get(b"content-length")
        size = int(announced) if announced else 0
        path = _path(self._url)
        self._head = Head(parser.get_method().decode(), path, headers, self._raw_headers, size, closes)
        if size > DIRECT_BYTES or b"transfer-encoding" in headers:
            self._body_limit = self._limits.body_limit(path, headers)
            self._expect_body(size)
        if b"expect" in headers and headers[b"expect"].lower() == b"100-continue" and not self._exchanges:
            self._transport.write(CONTINUE)

    def on_chunk_header(self) -> None:
        self._chunk_is_empty = True

    def on_body(self, data: bytes) -> None:
        self._loose_bytes = 0
        if self._direct is not None:
            self._direct.append(data)
        else:
            self._extend_body(data)

    def on_message_complete(self) -> None:
        self._is_between = True
        if self._is_deaf:
            return
        head = self._head
        body = memoryview(self._body) if self._direct is None else self._direct.memory
        self._begin()
        self._take(head, body)

    # ------------------------------------------------------------------ the host calls

    def answered(self) -> None:
        """An exchange has its reply: write what is in turn."""
        exchanges = self._exchanges
        while exchanges and exchanges[0].reply is not None:
            exchange = exchanges.popleft()
            buffers = serialise(cast("HttpReply", exchange.reply), exchange.closes, exchange.is_head)
            if len(buffers) == 1:
                self._transport.write(buffers[0])
            else:
                self._transport.writelines(buffers)
            if exchange.closes:
                self._end()
                return
        if not self._is_reading:
            self._balance()

    @property
    def peer(self) -> str:
        """The address of the other end; empty where that is not known."""
        return host_of(self._transport.get_extra_info("peername"))

    def stop(self) -> None:
        """Answer what has arrived or is arriving, then close."""
        self._is_stopping = True
        if self._is_busy_receiving():
            return  # it will be the last
        if self._exchanges:
            self._exchanges[-1].closes = self._is_deaf = True
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def sweep(self) -> None:
        """Called every `SWEEP_SECONDS`: give up a request that has stopped arriving."""
        self._quiet_sweeps += 1
        limits = self._limits
        if self._is_lingering:
            if self._quiet_sweeps > 1 or self._head_sweeps > limits.linger_sweeps:
                self._transport.abort()
            self._head_sweeps += 1
        elif self._is_receiving and self._is_reading:
            self._head_sweeps += self._in_head
            if self._quiet_sweeps > limits.quiet_sweeps or self._head_sweeps > limits.head_sweeps:
                self._give_up()

    # ------------------------------------------------------------------ receiving

    def _recognise(self, nbytes: int) -> bool:
        """Take what was received if it is a request with a known head, and nothing else."""
        if self._awaiting is not None:
            return self._recognise_body(nbytes)
        begin = self._received.find(END, 0, nbytes) + len(END)
        raw = self._scratch[:begin].tobytes()
        head = self._find_head(raw)
        if head is None:
            return False
        if nbytes == begin + head.body_bytes:
            self._take(head, memoryview(self._scratch[begin:nbytes].tobytes()))
            return True
        if nbytes == begin:
            self._awaiting = raw, head
            self._is_receiving, self._head_sweeps = True, 0
        return nbytes == begin

    def _recognise_body(self, nbytes: int) -> bool:
        assert self._awaiting is not None
        (raw, head), self._awaiting = self._awaiting, None
        if nbytes == head.body_bytes:
            self._take(head, memoryview(self._scratch[:nbytes].tobytes()))
            return True
        self._feed(memoryview(raw))  # the body comes in pieces, which the parser puts together
        return False

    def _feed(self, data: memoryview) -> None:
        if self._is_deaf:
            return  # thrown away
        self._loose_bytes += len(data)
        is_whole, self._begun, known = self._is_between, 0, self._head
        try:
            self._parser.feed_data(data)
            if is_whole and self._begun == 1 and self._head is not known:
                self._keep_head(data, self._head)
        except httptools.HttpParserUpgrade as upgrade:
            # Nothing is upgraded to: go on in HTTP/1.1 behind the request that asked.
            self._parser = httptools.HttpRequestParser(self)
            self._feed(data[upgrade.args[0] :])
        except httptools.HttpParserInvalidMethodError:
            self._refuse(text_error(405, "Method Not Allowed"))
        except httptools.HttpParserCallbackError as error:
            self._refuse(self._refusal or _failed(error))
        except httptools.HttpParserError as error:
            self._refuse(text_error(400, f"malformed HTTP request: {error}"))
        if self._loose_bytes > self._limits.head_bytes:
            self._refuse(text_error(431, f"request headers or trailers exceed {self._limits.head_bytes} bytes"))

    def _take(self, head: Head, body: memoryview) -> None:
        """Have a request answered that has arrived."""
        self._is_receiving = False
        self._loose_bytes = self._head_sweeps = 0
        self._is_deaf = head.closes or self._is_stopping
        exchange = Exchange(self, self._is_deaf, head.method == "HEAD")
        self._exchanges.append(exchange)
        request = HttpRequest(head.method, head.path, head.headers, body, head.raw_headers)
        cancel = self._dispatch(request, exchange)
        if exchange.reply is None:
            exchange.cancel = cancel
        if len(self._exchanges) >= self._limits.in_flight:
            self._balance()

    def _expect_body(self, size: int) -> None:
        """Make room for a body that is large or of unknown length, or refuse it."""
        if size > self._body_limit:
            self._stop_parsing(error_reply(self._limits.body_refusal(size, self._headers)))
        if size > DIRECT_BYTES:
            text = self._headers.get(HEADER_LENGTH, b"0")
            json_bytes = int(text) if text.isdigit() and len(text) < 12 else 0
            try:
                self._direct = DirectBody(size, json_bytes)
            except MemoryError:
                self._stop_parsing(error_reply(Unavailable(f"no memory for a request body of {size} bytes")))

    def _extend_body(self, data: bytes) -> None:
        if not self._body:
            self._body = data
        else:
            if type(self._body) is not bytearray:
                self._body = bytearray(self._body)
            self._body += data
        if self._body_limit:
            self._check_chunk()

    def _check_chunk(self) -> None:
        """Bound what a chunked body may add up to, in chunks and in bytes."""
        if self._chunk_is_empty:
            self._chunk_is_empty = False
            self._chunks += 1
            if self._chunks > self._limits.chunks:
                self._stop_parsing(error_reply(too_many_chunks(self._limits.chunks)))
        if len(self._body) > self._body_limit:
            self._stop_parsing(error_reply(self._limits.body_refusal(len(self._body), self._headers)))

    def _begin(self) -> None:
        """Forget the request that has arrived."""
        self._url = b""
        self._headers, self._raw_headers = {}, []
        self._body, self._direct = b"", None
        self._body_limit = self._chunks = 0
        self._in_head = True
        self._is_receiving = False

    def _is_busy_receiving(self) -> bool:
        return self._awaiting is not None or (self._is_receiving and bool(self._url))

    def _balance(self) -> None:
        """Read on only while answers go out as fast as requests come in."""
        wanted = self._is_writable and len(self._exchanges) < self._limits.in_flight
        if wanted != self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    # ------------------------------------------------------------------ refusing and answering

    def _stop_parsing(self, reply: HttpReply) -> None:
        self._refusal = reply
        raise _Refused

    def _refuse(self, reply: HttpReply) -> None:
        """Answer after those in turn and read no further request on this connection."""
        if self._is_deaf:
            return
        self._is_deaf = self._is_refused = True
        self._awaiting = None
        self._begin()
        exchange = Exchange(self, True, False)
        self._exchanges.append(exchange)
        exchange(reply)

    def _give_up(self) -> None:
        if self._is_busy_receiving():
            self._refuse(text_error(408, "the request did not arrive in time"))
        else:
            self._transport.close()  # connected, and never said a word

    def _end(self) -> None:
        """Close behind the last answer, once the caller has had a chance to read it.

        Closing with unread bytes in the socket would reset the connection and lose the answer.
        """
        self._exchanges.clear()
        if not self._is_refused or self._is_stopping:
            self._transport.close()
            return
        self._is_lingering = True
        self._quiet_sweeps = self._head_sweeps = 0
        self._transport.write_eof()
        self._balance()


def _failed(error: BaseException) -> HttpReply:
    """For a fault of our own inside the parser's callbacks."""
    log.error("a connection failed", exc_info=error)
    return error_reply(InternalError("the connection failed inside the server; its log has the reason"))


def _path(url: bytes) -> str:
    """The path of a request target: without query, and without scheme and host if it has them."""
    return _short_path(url) if len(url) < 256 else _split_path(url)


def _split_path(url: bytes) -> str:
    path = url.partition(b"?")[0].decode("latin-1")
    if path[:1] != "/" and "://" in path:
        return "/" + path.split("://", 1)[1].partition("/")[2]
    return path


#: Callers ask for the same few paths again and again; what is long is not worth keeping.
_short_path = lru_cache(1024)(_split_path)
