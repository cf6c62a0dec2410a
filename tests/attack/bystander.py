"""A caller who has nothing to do with an attack, in a process of its own, and how long it waits for its answers.

``python bystander.py HTTP_PORT`` asks for health on a schedule, and for an answer of the model ``echo`` now and
then, until its standard input is closed; then it prints what it saw as JSON. A probe that could not be sent in time,
because the one before was not answered, counts from the time at which it was due: a server that stands still for two
seconds is late for every probe of them.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time

#: Between two probes of health.
PERIOD_NS = 5_000_000
#: So many probes of health for each question to the model.
PER_INFERENCE = 10
#: A server that does not answer for so long has lost the probe.
TIMEOUT_S = 20.0


def watch(port: int) -> dict[str, object]:
    """Latencies of health in nanoseconds, and a line for each probe that was answered wrongly or not at all."""
    latencies_ns: list[int] = []
    failures: list[str] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    due = time.monotonic_ns()
    print("watching", flush=True)
    while not select.select([sys.stdin], [], [], max(0, due - time.monotonic_ns()) / 1e9)[0]:
        try:
            _ask(connection, "GET", "/v2/health/live")
            latencies_ns.append(time.monotonic_ns() - due)
            if len(latencies_ns) % PER_INFERENCE == 0:
                _infer(connection, float(len(latencies_ns)))
        except (OSError, http.client.HTTPException, ValueError) as error:
            failures.append(f"{type(error).__name__}: {error}")
            latencies_ns.append(time.monotonic_ns() - due)
            connection.close()  # the next request opens it again
        due += PERIOD_NS
    connection.close()
    return {"latencies_ns": latencies_ns, "failures": failures}


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
