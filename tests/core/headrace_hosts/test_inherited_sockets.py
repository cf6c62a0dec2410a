"""Sockets that a process inherits as systemd hands them over, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest

#: Gives the descriptors of the process the numbers 3, 4, ..., and sets the variables of systemd.
HAND_OVER = """
import os
kept = [os.dup(each) for each in {descriptors}]
for number, each in enumerate(kept, 3):
    os.dup2(each, number)
os.environ.update(LISTEN_FDS=str(len(kept)), LISTEN_PID=str({process} or os.getpid()))
"""
TAKE = """
from headrace_hosts.inherited_sockets import take_inherited
from headrace_hosts.listening import bind
first = take_inherited({ports}[0])
print(bool(first), take_inherited({ports}[0]), take_inherited(1))
if first:
    print(first.getsockname()[1] == {ports}[0], first.getblocking(), os.get_inheritable(first.fileno()))
    print(bind("127.0.0.1", {ports}[1], False).fileno())
"""


def take(ports: Sequence[int], descriptors: Sequence[int], process: int = 0) -> list[str]:
    """Return the words that a process prints that inherits ``descriptors``."""
    code = (HAND_OVER + TAKE).format(ports=ports, descriptors=descriptors, process=process)
    done = subprocess.run(
        [sys.executable, "-c", code], pass_fds=descriptors, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def listen(family: socket.AddressFamily) -> socket.socket:
    listener = socket.socket(family)
    listener.bind(("", 0))
    listener.listen()
    return listener


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_each_socket_is_taken_once_by_its_port(family: socket.AddressFamily) -> None:
    stranger, left = socket.socketpair()
    with listen(family) as one, listen(family) as other, stranger, left:
        ports = [each.getsockname()[1] for each in (one, other)]
        found = take(ports, [stranger.fileno(), one.fileno(), other.fileno()])
    assert found == ["True", "None", "None", "True", "False", "False", "5"]


def test_sockets_for_another_process_are_not_taken() -> None:
    with listen(socket.AF_INET) as one:
        assert take([one.getsockname()[1]], [one.fileno()], process=1) == ["False", "None", "None"]
