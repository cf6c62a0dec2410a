"""Callers who have nothing to do with an attack, in a process of their own, and how long they wait for answers.

``python bystander.py HTTP_PORT`` asks for health on a schedule, and for an answer of the model ``echo`` now and
then, until its standard input is closed; then it prints what it saw as JSON. A probe that could not be sent in time,
because the one before was not answered, counts from the time at which it was due: a server that stands still for two
seconds is late for every probe of them. The probes are shared out to connections, so that one of them does not wait for
the other as long as both are soon enough.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time

#: Between two probes of health, and between those of one connection.
PERIOD_NS = 5_000_000
CALLERS = 4
#: So many probes of health for each question to the model.
PER_INFERENCE = 10
#: A server that does not answer for so long has lost the probe.
TIMEOUT_S = 20.0


class Caller(threading.Thread):
    """One connection, whose first probe is due at ``due_ns`` of the monotonic clock, until ``stopped``."""

    def __init__(self, port: int, due_ns: int, stopped: threading.Event) -> None:
        super().__init__(daemon=True)
        self._due_ns, self._stopped = due_ns, stopped
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self._connection.connect()  # a connection from before the attack stays open
        #: Latencies of health in nanoseconds, and a line for each probe that was answered wrongly or not at all.
        self.latencies_ns: list[int] = []
        self.failures: list[str] = []
        self.start()

    def run(self) -> None:
        connection = self._connection
        while not self._stopped.wait(max(0, self._due_ns - time.monotonic_ns()) / 1e9):
            try:
                _ask(connection, "GET", "/v2/health/live")
                self.latencies_ns.append(time.monotonic_ns() - self._due_ns)
                if len(self.latencies_ns) % PER_INFERENCE == 0:
                    _infer(connection, float(len(self.latencies_ns)))
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                self.latencies_ns.append(time.monotonic_ns() - self._due_ns)
                connection.close()  # the next request opens it again
            self._due_ns += PERIOD_NS * CALLERS
        connection.close()


def watch(port: int) -> dict[str, object]:
    """Return the results of all callers when standard input is closed."""
    start, stopped = time.monotonic_ns(), threading.Event()
    callers = [Caller(port, start + number * PERIOD_NS, stopped) for number in range(CALLERS)]
    print("watching", flush=True)
    sys.stdin.read()
    stopped.set()
    for caller in callers:
        caller.join()
    return {
        "latencies_ns": [latency for caller in callers for latency in caller.latencies_ns],
        "failures": [line for caller in callers for line in caller.failures],
    }


def _infer(connection: http.client.HTTPConnection, value: float) -> None:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [2], "data": [value, -value]}
    answer = json.loads(_ask(connection, "POST", "/v2/models/echo/infer", json.dumps({"inputs": [tensor]})))
    if answer["outputs"][0]["data"] != tensor["data"]:
        raise ValueError(f"asked {tensor['data']}, answered {answer}")


def _ask(connection: http.client.HTTPConnection, method: str, path: str, body: str | None = None) -> bytes:
    connection.request(method, path, body)
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise ValueError(f"{method} {path}: {response.status} {content[:200]!r}")
    return content


if __name__ == "__main__":
    json.dump(watch(int(sys.argv[1])), sys.stdout)
