"""Reads the state of a connection from the kernel, and resets connections."""

from __future__ import annotations

import asyncio
import socket
import struct

try:
    from fcntl import ioctl
    from termios import TIOCOUTQ
except ImportError:  # Windows
    ioctl = None  # type: ignore[assignment]

#: The first byte of Linux's ``tcp_info``.
_ESTABLISHED = 1
#: Of ``SO_LINGER``: what is closed is reset, and drops what it has not sent.
_AT_ONCE = struct.pack("ii", 1, 0)


def unsent_bytes(connection: socket.socket) -> int:
    """Return the bytes that the kernel holds because the client has not taken them."""
    if ioctl is None or connection.fileno() < 0:
        return 0
    return int.from_bytes(ioctl(connection.fileno(), TIOCOUTQ, bytes(4)), "little")


def has_left(connection: socket.socket) -> bool:
    """Return True if a client that closed its side has closed the other side, too."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


def has_closed(connection: socket.socket) -> bool:
    """Return True if the client has closed its side, also while nothing is read; False if the kernel does not tell."""
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
    except (OSError, AttributeError):  # not TCP, or not Linux
        return False


def reset(transport: asyncio.Transport) -> None:
    """Close ``transport`` so that the client cannot take that for the end of what was sent."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()
