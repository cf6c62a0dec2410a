"""One TLS connection of a server: a transport for the protocol of a host, on the plain transport of the event loop.

The TLS of the event loops decrypts all bytes of one read without a pause: a peer that sends only key updates, or
records of one byte, blocks the loop for seconds. Here such a peer waits, and all others are served.

::

    SILENT --first byte--> HANDSHAKE --done--> OPEN --close, end of the peer--> ENDING --the peer's end, 30 s--> closed
                               |____ refused _______________________________________|
"""

from __future__ import annotations

import asyncio
import enum
import logging
import ssl
from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

from headrace.telemetry.log_limits import rate_limited_logger
from headrace_hosts.handshakes import HandshakeQueue
from headrace_hosts.tls_files import TlsContexts

#: Its lines are in the audit log, too.
audit_log = rate_limited_logger("headrace.audit.tls.refused")
log = logging.getLogger(__name__)

#: Content type 22 of TLS records, which all versions since SSL 3.0 begin with (RFC 8446 section 5.1).
_HANDSHAKE = 22
#: Plaintext is encrypted in pieces of this size, which stay in the processor's cache.
_PIECE_BYTES = 256 * 1024
#: The plaintext of one record, which OpenSSL encrypts whole.
_SMALL_BYTES = 16 * 1024
_BUFFER_BYTES = 64 * 1024
#: The size of one read from a peer that has not sent much yet, or sends little but framing.
_FIRST_BYTES = 16 * 1024
#: A peer may send this many bytes more than twice its payload, before it has to wait. A record has at most 16,640.
_EXCESS_BYTES = 20_000
#: Unsent answers to the key updates of such a peer. With more it is disconnected.
_UNSENT_BYTES = 256 * 1024
#: After the last byte was sent, input is dropped for this time, so that the peer can read it.
_LINGER_S = 30.0


class TlsPhase(enum.Enum):
    """The phase of a connection."""

    SILENT = enum.auto()
    HANDSHAKE = enum.auto()
    OPEN = enum.auto()
    ENDING = enum.auto()


class TlsPort:
    """The shared state of the connections of one port. Event loop only.

    ``no_tls`` is sent to a client that does not speak TLS.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        contexts: TlsContexts,
        handshakes: HandshakeQueue,
        no_tls: bytes,
    ) -> None:
        self.make_protocol, self.contexts, self.handshakes, self.no_tls = make_protocol, contexts, handshakes, no_tls
        #: Receive buffers for bytes as they arrive and for decrypted ones. Each is used within one callback.
        self.received = memoryview(bytearray(_BUFFER_BYTES))
        self.decrypted = memoryview(bytearray(_BUFFER_BYTES))


class TlsConnection(asyncio.Transport, asyncio.BufferedProtocol):
    """The protocol of the plain transport, and the transport of a host's protocol. Event loop only."""

    _get_buffer: Callable[[int], memoryview]
    _buffer_updated: Callable[[int], None]

    def __init__(self, port: TlsPort) -> None:
        super().__init__()
        self._port = port
        self._scratch = port.received
        self._details: dict[str, Any] = {}
        self.phase = TlsPhase.SILENT
        self._plain: asyncio.Transport
        self._tls: ssl.SSLObject
        self._protocol: asyncio.BaseProtocol | None = None
        self._excess_bytes = 0
        self._read_bytes = _FIRST_BYTES
        self._is_paused = self._is_late = self._is_closing = False
        self._is_reading = True
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ the plain transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast("asyncio.Transport", transport)
        self._port.handshakes.add(self, self.address, self._plain.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.handshakes.remove(self)
        self.phase, self._is_closing = TlsPhase.ENDING, True
        if self._timer is not None:
            self._timer.cancel()
        if self._protocol is not None:
            self._protocol.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch[: self._read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        if self.phase is TlsPhase.OPEN:
            self._incoming.write(self._scratch[:nbytes])
            if self._excess_bytes > _EXCESS_BYTES:
                self._read_slowly(nbytes)
                return
            self._excess_bytes = max(0, self._excess_bytes + nbytes - 2 * self._read())
            if self._excess_bytes > _EXCESS_BYTES:
                self._read_bytes = _FIRST_BYTES
            elif nbytes == self._read_bytes and not self._excess_bytes:
                self._read_bytes = len(self._scratch)
        elif self.phase is TlsPhase.ENDING:
            pass  # dropped
        else:
            self._receive_handshake(nbytes)

    def eof_received(self) -> bool:
        """Let the plain transport close: a peer that closes without a TLS close alert has disconnected."""
        return False

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    # ------------------------------------------------------------------ the handshake

    @property
    def address(self) -> str:
        """The address of the peer; empty if it is unknown."""
        name = self._plain.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) and name else ""

    def _receive_handshake(self, nbytes: int) -> None:
        """Do the next step if a turn is free. Otherwise stop reading the socket until this connection has a turn."""
        if self.phase is TlsPhase.SILENT:
            first = self._scratch[0]
            if first != _HANDSHAKE:
                audit_log.info("a client at %s is refused: it does not speak TLS", self.address)
                if chr(first).isalpha():
                    self._plain.write(self._port.no_tls)
                self._end()
                return
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            context = self._port.contexts.choose(bytes(self._scratch[:nbytes]))
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
            self.phase = TlsPhase.HANDSHAKE
        self._incoming.write(self._scratch[:nbytes])
        if self._port.handshakes.is_free():
            self._shake_hands()
        else:
            self._is_late = True
            self._balance()
            self._port.handshakes.wait(self, self._shake_hands)

    def _shake_hands(self) -> None:
        """Do the next step of the handshake, in the turn of this connection."""
        if self.phase is not TlsPhase.HANDSHAKE or self._plain.is_closing():
            return
        self._is_late = False
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            self._balance()
        except ssl.SSLError as error:
            self._send()  # the alert
            if isinstance(error, ssl.SSLCertVerificationError):
                audit_log.warning(
                    "the certificate of a client at %s is refused: %s", self.address, error.verify_message
                )
            else:
                audit_log.info("a TLS handshake with %s failed: %s", self.address, error.reason or error)
            self._end()
        else:
            self._send()
            self._open()

    def _open(self) -> None:
        self.phase = TlsPhase.OPEN
        self._port.handshakes.remove(self)
        self._protocol = protocol = self._port.make_protocol()
        if isinstance(protocol, asyncio.BufferedProtocol):
            self._get_buffer = cast("Callable[[int], memoryview]", protocol.get_buffer)
            self._buffer_updated = protocol.buffer_updated
        else:
            received, buffer = cast("asyncio.Protocol", protocol), self._port.decrypted
            self._get_buffer = lambda _: buffer
            self._buffer_updated = lambda nbytes: received.data_received(bytes(buffer[:nbytes]))
        self._details["sslcontext"], self._details["ssl_object"] = self._tls.context, self._tls
        self._details["peercert"], self._details["cipher"] = self._tls.getpeercert(), self._tls.cipher()
        protocol.connection_made(self)
        self._resume()

    # ------------------------------------------------------------------ receiving

    def _read(self) -> int:
        """Pass received data to the protocol, until it pauses. Return the number of bytes."""
        tls, incoming, passed = self._tls, self._incoming, 0
        is_partial = has_ended = False
        try:
            while not (self._is_paused or is_partial or has_ended) and (incoming.pending or tls.pending()):
                if self.phase is not TlsPhase.OPEN:
                    break
                buffer = self._get_buffer(-1)
                size, filled = len(buffer), 0
                try:
                    while filled < size and (incoming.pending or tls.pending()):
                        count: int = tls.read(size - filled, buffer[filled:] if filled else buffer)  # type: ignore[assignment]
                        if not count:
                            has_ended = True
                            break
                        filled += count
                except ssl.SSLWantReadError:
                    is_partial = True
                if filled:
                    passed += filled
                    self._buffer_updated(filled)
            if self._outgoing.pending:
                self._send()
        except ssl.SSLError as error:
            log.debug("a TLS peer at %s broke a rule: %s", self.address, error)
            self._send()
            self._end()
        if has_ended and self.phase is TlsPhase.OPEN:
            cast("asyncio.Protocol", self._protocol).eof_received()
            self.close()  # for any return value, as the TLS of the loops does
        return passed

    def _read_slowly(self, nbytes: int) -> None:
        """Read from a peer that sends little but framing. All such peers together have a quarter of the time."""
        begin = perf_counter()
        self._excess_bytes = max(0, self._excess_bytes + nbytes - 2 * self._read())
        if self._plain.get_write_buffer_size() > _UNSENT_BYTES and self._excess_bytes > _EXCESS_BYTES:
            self._plain.abort()
            return
        self._is_late = True
        self._balance()
        self._port.handshakes.delay(perf_counter() - begin, self._read_again)

    def _read_again(self) -> None:
        self._is_late = False
        self._balance()

    def _resume(self) -> None:
        """Resume reading, first the rest of the last read."""
        if self.phase is TlsPhase.OPEN and not self._is_paused:
            self._read()
        self._balance()

    def _balance(self) -> None:
        """Read the socket unless the protocol has paused, or the connection waits for a turn."""
        reads = self.phase is TlsPhase.ENDING or not (self._is_paused or self._is_late)
        if reads is not self._is_reading and not self._plain.is_closing():
            self._is_reading = reads
            (self._plain.resume_reading if reads else self._plain.pause_reading)()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._balance()

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self._incoming.pending or self._tls.pending():
                asyncio.get_running_loop().call_soon(self._resume)
            else:
                self._balance()

    def is_reading(self) -> bool:
        return not self._is_paused and not self.is_closing()

    # ------------------------------------------------------------------ sending

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self.phase is not TlsPhase.OPEN:
            return
        if len(data) <= _SMALL_BYTES and type(data) is bytes:
            self._tls.write(data)
            self._plain.write(self._outgoing.read())
            return
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._tls.write(rest[:_PIECE_BYTES]) :]
            self._send()

    def _send(self) -> None:
        self._plain.write(self._outgoing.read())

    def get_write_buffer_size(self) -> int:
        return self._plain.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._plain.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._plain.set_write_buffer_limits(high, low)

    # ------------------------------------------------------------------ the end

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Send the close alert of TLS and the end of the connection. Later input of the peer is dropped."""
        if self.phase is TlsPhase.OPEN:
            try:
                self._tls.unwrap()
            except ssl.SSLError as error:  # the peer's own end has not arrived
                log.debug("TLS with %s ends: %s", self.address, error)
            self._send()
            self._end()

    def _end(self) -> None:
        """Send nothing more, and wait up to 30 s until the peer closes: closing with unread bytes would reset it."""
        self.phase = TlsPhase.ENDING
        if not self._plain.is_closing():
            self._plain.write_eof()
            self._timer = asyncio.get_running_loop().call_later(_LINGER_S, self._plain.abort)
        self._balance()

    def close(self) -> None:
        self._is_closing = True
        self.write_eof()

    def abort(self) -> None:
        self._is_closing = True
        self._plain.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._plain.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._details[name] if name in self._details else self._plain.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        raise NotImplementedError("a TLS connection has one protocol")

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol
