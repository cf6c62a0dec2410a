"""Ports for programs that must be told their port. A server of Headrace takes port 0, and says which one it got."""

from __future__ import annotations

import os
import socket
from itertools import count

#: Below the ports that systems give to connections and to port 0, so that nothing takes one by chance.
_FIRST, _LAST = 18_000, 32_000
#: Processes begin at different places: those of one test run have neighbouring ids.
_places = count(os.getpid() * 61)


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nobody listens, another one at each call."""
    for place in _places:
        port = _FIRST + place % (_LAST - _FIRST)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("there is no end of numbers")
