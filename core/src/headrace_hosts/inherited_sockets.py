"""Sockets on which another program listens already, and which it hands to this process: systemd's socket activation.

Source: the manual page sd_listen_fds(3). ``LISTEN_FDS`` sockets begin at descriptor 3; ``LISTEN_PID`` is this process.
"""

from __future__ import annotations

import os
import socket
from functools import cache

_FIRST = 3


def take_inherited(port: int) -> socket.socket | None:
    """Return the inherited socket that listens on ``port``, on whatever address; None if there is none.

    The address is the business of the program that made the socket. Each socket is returned once.
    """
    return _inherited().pop(port, None)


@cache
def _inherited() -> dict[int, socket.socket]:
    """Return the inherited TCP sockets by port. They are closed in child processes."""
    count, process = os.environ.get("LISTEN_FDS", ""), os.environ.get("LISTEN_PID", "")
    if not count.isdecimal() or process != str(os.getpid()):
        return {}
    found = {}
    for descriptor in range(_FIRST, _FIRST + int(count)):
        os.set_inheritable(descriptor, False)
        listener = socket.socket(fileno=descriptor)
        if listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM:
            listener.setblocking(False)
            found[listener.getsockname()[1]] = listener
    return found
