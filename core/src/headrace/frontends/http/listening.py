"""The listening socket, whatever host accepts from it."""

from __future__ import annotations

import errno
import socket

from headrace.errors import Unavailable
from headrace.frontends.listening import bind


def listen(address: str, port: int, is_shared: bool) -> socket.socket:
    """A socket that listens on ``address``; port 0 takes a free one.

    ``is_shared`` lets other processes listen on the same port. Raises `Unavailable` naming address
    and port.
    """
    try:
        return bind(address, port, is_shared)
    except OSError as error:
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else str(error)
        raise Unavailable(f"failed to listen for HTTP on {address}:{port}: {reason}") from error
