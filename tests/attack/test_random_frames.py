"""Random HTTP/2 frames behind a valid preface, on streams of gRPC: asyncio has nothing to complain of."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import struct
from typing import TYPE_CHECKING

import pytest

from .test_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RESET,
    SETTINGS,
    UPDATE,
    Frame,
    echo,
    head,
    raw,
)

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: Connections in a plain run, and in `nox -s attack`.
FEW, MANY = 8_000, 40_000
#: What asyncio and Python log of tasks, futures and generators that nothing owns.
COMPLAINT = re.compile(
    r"Task was destroyed but it is pending|exception was never retrieved|was never awaited|already running"
    r"|Exception in callback|Traceback"
)


def connection(chance: random.Random) -> bytes:
    """Return a preface, a call or two of ``ModelStreamInfer`` with or without a message, and random frames."""
    first, again = head("ModelStreamInfer")
    sent = PREFACE + raw(SETTINGS)
    for number in range(chance.randrange(1, 4)):
        sent += raw(HEADERS, again if number else first, 2 * number + 1, END_HEADERS)
        if chance.random() < 0.7:
            message = echo(chance.choice([0, 1, 100]), chance.choice(["echo", "huge", "none"]))
            message = message if chance.random() < 0.8 else message[: chance.randrange(len(message))]
            sent += raw(DATA, message, 2 * number + 1, chance.choice([0, 0, END_STREAM]))
    for _ in range(chance.randrange(6)):
        kind = chance.choice([DATA, HEADERS, RESET, UPDATE, chance.randrange(12)])
        content = struct.pack(">I", chance.choice([0, 8, 2**31 - 1])) if kind in (RESET, UPDATE) else b""
        content = content if chance.random() < 0.8 else chance.randbytes(chance.randrange(40))
        sent += raw(kind, content, chance.choice([0, 1, 1, 3, 5, 2]), chance.choice([0, 1, 4, 5, 8, 32]))
    return sent


def attack(port: int, chance: random.Random) -> None:
    """Send one such connection, and end it as the chance says: at once, by a reset, or after an answer."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as peer:
        peer.settimeout(5)
        peer.sendall(connection(chance))
        ends = chance.randrange(4)
        if ends == 1:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif ends == 2:
            peer.recv(1 << 16)
        elif ends == 3:
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1 << 16)


@pytest.mark.usefixtures("of_its_own")
def test_random_frames_leave_no_task_behind(
    request: pytest.FixtureRequest, attacked_natively: Headrace, under_attack: Frame
) -> None:
    is_judged = request.config.getoption("--health-p99-ms", None) is not None
    chance = random.Random(11)
    with under_attack(attacked_natively):
        for _ in range(MANY if is_judged else FEW):
            attack(attacked_natively.grpc, chance)
    attacked_natively.stop()
    complaints = [line for line in attacked_natively.lines if COMPLAINT.search(line)]
    assert not complaints, complaints[:5]
