"""Listening sockets for all hosts, and their log lines."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from headrace.errors import Unavailable
from headrace_hosts.inherited_sockets import take_inherited

if TYPE_CHECKING:
    from headrace.engine import Engine

#: At most this many connections wait to be accepted (docs/spec/behaviours.md section 1.1).
BACKLOG = 1024


#: Returns a socket for an address and a port: ``listen(address, port, is_shared, listens)``.
Listen: TypeAlias = "Callable[[str, int, bool, bool], socket.socket]"


def bind(address: str, port: int, is_shared: bool, listens: bool = True) -> socket.socket:
    """Return a socket that listens on ``address``, or only reserves the port. Port 0 takes a free one.

    If systemd listens on the port for this process, return its socket. ``is_shared`` lets other processes listen on the
    same port. Raises OSError.
    """
    if inherited := take_inherited(port):
        return inherited
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "neither an address nor the name of a host") from error
    family, kind, protocol, _, name = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(name)
        if listens:
            listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_http(
    address: str, port: int, is_shared: bool, listens: bool = True, service: str = "HTTPService"
) -> socket.socket:
    """Return `bind` for an HTTP service. Raises `Unavailable` with the service, address and port."""
    try:
        return bind(address, port, is_shared, listens)
    except OSError as error:
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise Unavailable(f"failed to listen for {service} on {address}:{port}: {reason}") from error


def listen_grpc(address: str, port: int, is_shared: bool, listens: bool = True) -> socket.socket:
    """Return `bind` for gRPC. Raises `Unavailable` with the address and port, in Triton's words if it is in use."""
    try:
        return bind(address, port, is_shared, listens)
    except OSError as error:
        place = shown_address(address, port)
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(f"Socket '{place}' already in use ") from error
        raise Unavailable(f"can not listen on '{place}' for gRPC: {error.strerror}") from error


def shown_address(address: str, port: int) -> str:
    """Return an address and a port as messages name them."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def reserve_port(listen: Listen, address: str, port: int, is_shared: bool) -> socket.socket:
    """Return a socket that reserves a port for processes that will share it. It does not listen itself.

    Unless ``is_shared``, raise if another process listens there now. Raises what ``listen`` raises.
    """
    if not is_shared:  # another process on the shared port would get a part of the connections
        with listen(address, port, False, True) as probe:
            port = probe.getsockname()[1]
    return listen(address, port, True, False)


def announce(engine: Engine, log: logging.Logger, service: str, place: str) -> None:
    """Log that ``service`` listens at ``place``. When it is ready, log Triton's line, which scripts wait for."""
    if engine.is_loading:
        log.info("%s listens at %s, and is ready when the models are loaded", service, place)
    engine.when_ready(lambda: log.info("Started %s at %s", service, place))
