"""Free ports for programs that need a port number. A Headrace server takes port 0 instead, and reports its port."""

from __future__ import annotations

import os
import socket
from itertools import count

#: Below the ephemeral ports, which systems give to connections and to port 0.
_FIRST, _LAST = 18_000, 32_000
#: Each process starts at another port: the ids of processes of one test run are close together.
_numbers = count(os.getpid() * 61)


def free_port() -> int:
    """Return a free port of 127.0.0.1, another one at each call."""
    for number in _numbers:
        port = _FIRST + number % (_LAST - _FIRST)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("unreachable: the numbers do not end")
