"""An open-loop load: requests are sent when they are due, independently of earlier responses.

``python benchmarks/open_loop.py ORDER`` runs in its own process, so that it shares no interpreter with the server.
ORDER is JSON, and the result is written to stdout as JSON. A closed loop such as wrk's sends less when the server is
slow, so it never builds the queue of real callers.

``late_us`` is the delay from the due time of a request until it was written. If that is a millisecond or more, the
arrivals were not the ordered ones, and the machine is too small for both programs.
"""

from __future__ import annotations

import json
import math
import random
import select
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

#: Created before the load begins, since creating a connection takes as long as sending several requests.
CONNECTED = 128
#: The wait for responses after the last request was due.
PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Order:
    """``rate`` requests per second on average, with exponential gaps, for ``seconds``; a rate of 0 sends as fast as
    ``connections`` allow, which is a closed loop. ``request`` is a file with the bytes of one."""

    port: int
    request: str
    rate: float
    seconds: float
    connections: int = 512
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """The result of an `Order`. Times are nanoseconds since its start: ``sent_ns`` of each request, in order."""

    sent_ns: list[int]
    late_us: dict[str, float]
    latency_us: dict[str, float]
    answered: int
    failed: int
    elapsed_s: float
    client_s: float


class Connection:
    """Sends one request at a time. ``number`` is the number of the current request."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=5)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.number = -1
        self._received = b""

    def read(self) -> bool | None:
        """Return True if the response is a success; None if it is incomplete."""
        self._received += self.socket.recv(1 << 16)
        head, mark, body = self._received.partition(b"\r\n\r\n")
        if not mark:
            return None
        lowered = head.lower()
        size = int(lowered.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(body) < size:
            return None
        self._received = b""
        return lowered.startswith(b"http/1.1 200")


def run(order: Order) -> Load:
    """Send the load. Return when all requests are answered, or `PATIENCE_S` after the last was due."""
    request = Path(order.request).read_bytes()
    due_ns = _schedule(order)
    closed = not order.rate
    poller, connections = select.epoll(), dict[int, Connection]()
    idle: deque[Connection] = deque()

    def connect() -> None:
        made = Connection(order.port)
        connections[made.socket.fileno()] = made
        poller.register(made.socket.fileno(), select.EPOLLIN)
        idle.append(made)

    for _ in range(min(order.connections, CONNECTED)):
        connect()
    sent_ns: list[int] = []
    late_ns: list[int] = []
    latency_ns: list[int] = []
    failed, open_requests = 0, 0
    cpu = time.process_time()
    start = time.perf_counter_ns()
    end_ns = int(order.seconds * 1e9)
    while True:
        now = time.perf_counter_ns() - start
        number = len(sent_ns)
        is_over = now >= end_ns if closed else number == len(due_ns)
        if not is_over and (closed or due_ns[number] <= now):
            if not idle and len(connections) < order.connections:
                connect()
            if idle:
                connection = idle.pop()
                connection.number = number
                now = time.perf_counter_ns() - start
                if connection.socket.send(request) != len(request):
                    raise RuntimeError("the server does not read")
                sent_ns.append(now)
                late_ns.append(0 if closed else now - due_ns[number])
                open_requests += 1
                continue
        if is_over and (not open_requests or now > end_ns + PATIENCE_S * 1e9):
            break
        for found, _ in _wait(poller, 0.05 if closed or is_over else (due_ns[number] - now) / 1e9, bool(idle)):
            connection = connections[found]
            well = connection.read()
            if well is None:
                continue
            now = time.perf_counter_ns() - start
            latency_ns.append(now - (sent_ns if closed else due_ns)[connection.number])
            failed += not well
            open_requests -= 1
            idle.append(connection)
    elapsed_s = (time.perf_counter_ns() - start) / 1e9
    return Load(
        sent_ns,
        _quantiles_us(late_ns),
        _quantiles_us(latency_ns),
        len(latency_ns),
        failed + open_requests,
        elapsed_s,
        time.process_time() - cpu,
    )


def _schedule(order: Order) -> list[int]:
    if not order.rate:
        return []
    gaps, now, due = random.Random(order.seed), 0.0, list[int]()
    while (now := now - math.log(1.0 - gaps.random()) / order.rate) < order.seconds:
        due.append(int(now * 1e9))
    return due


def _wait(poller: select.epoll, seconds: float, may_send: bool) -> list[tuple[int, int]]:
    """Return the readable connections, after at most ``seconds``. Unlike epoll, select does not round to ms."""
    if seconds > 0 or not may_send:
        select.select([poller], [], [], max(0.0, seconds) if may_send else 0.05)
    return poller.poll(0)


def _quantiles_us(values_ns: list[int]) -> dict[str, float]:
    ordered = sorted(values_ns) or [0]
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1000 for name, share in shares.items()}


def put(order: Order) -> Load:
    """Do as `run`, in another process."""
    command = [sys.executable, str(Path(__file__).resolve()), json.dumps(asdict(order))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=order.seconds + 60, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return Load(**json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(asdict(run(Order(**json.loads(sys.argv[1]))))))
