"""Accepting connections, with TLS or without."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace_hosts.handshakes import HandshakeQueue
from headrace_hosts.listening import BACKLOG
from headrace_hosts.tls_connections import TlsConnection, TlsPort
from headrace_hosts.tls_files import TlsFiles


class Acceptor(Protocol):
    """Accepts connections until it is closed."""

    def close(self) -> None:
        """Accept no more. Open connections stay."""


async def accept(
    make_protocol: Callable[[], asyncio.BaseProtocol],
    listener: socket.socket,
    tls: TlsFiles | None,
    protocols: Sequence[str],
    *,
    handshake_s: float,
    no_tls: bytes = b"",
) -> Acceptor:
    """Accept the connections of ``listener`` on the running loop. Each gets a protocol, over TLS after its handshake.

    ``protocols`` are those of ALPN, the best first. ``handshake_s`` is the time from the connect to the end of the
    handshake; 0 is no limit. A client that does not speak TLS is sent ``no_tls`` and closed. Raises `ConfigError`
    for a file of TLS.
    """
    loop = asyncio.get_running_loop()
    if tls is not None:
        contexts = await asyncio.to_thread(tls.contexts, protocols)
        port = TlsPort(make_protocol, contexts, HandshakeQueue(handshake_s), no_tls)
        server = await loop.create_server(lambda: TlsConnection(port), sock=listener, backlog=BACKLOG)
        return _TlsAcceptor(server, port.handshakes)
    return await loop.create_server(make_protocol, sock=listener, backlog=BACKLOG)


class _TlsAcceptor:
    """Also closes the connections whose handshakes have not ended: no protocol has them yet."""

    def __init__(self, server: asyncio.Server, handshakes: HandshakeQueue) -> None:
        self._server, self._handshakes = server, handshakes

    def close(self) -> None:
        self._server.close()
        self._handshakes.abort()
