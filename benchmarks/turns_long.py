"""Measure the effect on others of a fast model that suddenly takes a second: ``python benchmarks/turns_long.py``.

An instance whose executions are short runs on the event loop, and a long execution cannot be predicted. All requests
wait for that one execution; the next one runs on the instance's thread. Meanwhile an identity gets 500 requests per
second. Prints the time from the due time of a request to its response, so that late requests count as well.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import servers
from load import Body, json_body
from servers import Running

#: Between two requests to the identity, and to the model that turns long.
PAUSE_S, OTHER_PAUSE_S = 0.002, 0.005
LONG_S = 1.0
_PLUGIN = f"""
import time
from headrace import Backend, Instance, hookimpl

class Turning(Instance):
    any_thread = True
    def execute(self, inputs):
        if inputs["INPUT0"][:, 0].any():
            time.sleep({LONG_S})
        return {{"OUTPUT0": inputs["INPUT0"]}}

class TurningBackend(Backend):
    name = "turning"
    def load(self, model):
        return Turning()

@hookimpl
def register_backends():
    return [TurningBackend]
"""
_CONFIG = """backend: "%s" max_batch_size: 8 input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }"""


class Asker:
    """One connection, with requests to one model."""

    def __init__(self, port: int, model: str) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._connection.makefile("rb")
        self._short = json_body(model, {"INPUT0": 4})
        self.long = False

    def ask(self) -> None:
        document = json.loads(self._short.data)
        document["inputs"][0]["data"] = [float(self.long)] * 4
        self.long = False
        body = Body(self._short.model, json.dumps(document).encode())
        head = f"POST {body.path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body.data)}\r\n\r\n"
        self._connection.sendall(head.encode() + body.data)
        status, size = self._answers.readline(), 0
        while (line := self._answers.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        answer = self._answers.read(size)
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {answer!r}")

    def close(self) -> None:
        self._answers.close()
        self._connection.close()


def late_ms(asker: Asker, seconds: float) -> list[float]:
    """Return the times from the due time of each request to its response, for ``seconds``."""
    late, due = list[float](), time.monotonic()
    end = due + seconds
    while due < end:
        time.sleep(max(0.0, due - time.monotonic()))
        asker.ask()
        late.append((time.monotonic() - due) * 1000)
        due += PAUSE_S
    return late


def measure(server: Running, seconds: float) -> None:
    identity, turning = Asker(server.http, "identity"), Asker(server.http, "turns")
    is_over = threading.Event()

    def keep_asking() -> None:
        while not is_over.wait(OTHER_PAUSE_S):
            turning.ask()

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        while (found := _runs_on(server)) != "event_loop":
            print(f"(the model runs on its {found})", file=sys.stderr)
            late_ms(identity, 1)
        print(f"{'':42} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}  the model runs then")
        phases: list[tuple[str, Callable[[], None]]] = [
            ("it is short", lambda: None),
            (f"it takes {LONG_S:g} s once, on the loop", lambda: setattr(turning, "long", True)),
            (f"it takes {LONG_S:g} s again", lambda: setattr(turning, "long", True)),
            ("it is short again", lambda: None),
        ]
        for name, begin in phases:
            begin()
            late = sorted(late_ms(identity, seconds))
            p50, p99 = late[len(late) // 2], late[int(len(late) * 0.99)]
            print(f"{name:42} {p50:8.2f} {p99:8.2f} {late[-1]:8.2f}  on the {_runs_on(server)}", flush=True)
    finally:
        is_over.set()
        thread.join()
        identity.close()
        turning.close()


def _runs_on(server: Running) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    [line] = [each for each in lines if each.startswith("nv_model_instances_on_event_loop") and '"turns"' in each]
    return "event_loop" if float(line.split()[-1]) else "thread"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5, help="for which each line is measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site, repository = Path(folder) / "site", Path(folder) / "models"
        for name, backend in (("identity", "identity"), ("turns", "turning")):
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "config.pbtxt").write_text(_CONFIG % backend)
        info = site / "headrace_turning-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "headrace_turning.py").write_text(_PLUGIN)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-turning\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[headrace]\nturning = headrace_turning\n")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        with servers.headrace(repository) as server:
            measure(server, options.seconds)


if __name__ == "__main__":
    main()
