"""Many event streams that no client reads: memory is bounded, others are served, and the work ends with its callers."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: Callers that do not read, and bytes of one event.
CALLERS, EVENT_BYTES = 40, 16384
#: Each request has a thread, which sends until its caller has left. The text "count" is answered with their number.
ENDLESS = f"""
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.running = 0
        self.sent = 0
        self.lock = threading.Lock()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if pb_utils.get_input_tensor_by_name(request, "text").as_numpy().ravel()[0] == b"count":
                self.send(sender, b"%d %d" % (self.running, self.sent))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                with self.lock:
                    self.running += 1
                threading.Thread(target=self.stream, args=(sender,), daemon=True).start()

    def stream(self, sender):
        while not sender.is_cancelled():
            self.send(sender, b"x" * {EVENT_BYTES})
            with self.lock:
                self.sent += 1
        with self.lock:
            self.running -= 1
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, sender, text):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("token", np.array([text], object))]))
"""
CONFIG = """backend: "python" instance_group { kind: KIND_CPU } model_transaction_policy { decoupled: true }
input { name: "text" data_type: TYPE_STRING dims: 1 } output { name: "token" data_type: TYPE_STRING dims: 1 }
"""
IDENTITY = """backend: "identity"
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""


@pytest.mark.parametrize("host", ["http", "hypercorn"])
def test_streams_that_nobody_reads_are_bounded_and_end(
    serve: Callable[..., Headrace], tmp_path: Path, wait_until: Callable[..., None], host: str
) -> None:
    for name, config in (("endless", CONFIG), ("echo", IDENTITY)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    (tmp_path / "endless/1/model.py").write_text(ENDLESS)
    server = serve(f"--model-repository={tmp_path}", f"--http-server={host}", "--http-stall-timeout-secs=0")
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{server.http}", timeout=30) as client,
        contextlib.ExitStack() as open_,
    ):

        def counts() -> tuple[int, int]:
            answer = client.post("/v2/models/endless/generate", json={"text": "count"}).json()
            running, sent = answer["token"].split()
            return int(running), int(sent)

        def echo() -> None:
            body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
            answer = client.post("/v2/models/echo/infer", json=body)
            assert answer.json()["outputs"][0]["data"] == [1]

        echo()
        assert counts() == (0, 0)
        before = server.rss_bytes
        body = json.dumps({"text": "go"}).encode()
        head = f"POST /v2/models/endless/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        callers = []
        for _ in range(CALLERS):
            caller = open_.enter_context(socket.create_connection(("127.0.0.1", server.http), timeout=30))
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.sendall(head.encode() + body)
            callers.append(caller)
        wait_until(lambda: counts()[0] == CALLERS, "all streams run")
        last = -1

        def stands_still() -> bool:
            nonlocal last
            echo()
            previous, last = last, counts()[1]
            return previous == last > CALLERS

        wait_until(stands_still, "the model waits for its callers", 60)
        assert server.rss_bytes - before < CALLERS * 64 * 2 * EVENT_BYTES, "64 unread responses each, twice"
        assert callers[0].recv(64 * 1024).startswith(b"HTTP/1.1 200"), "who reads goes on"
        for caller in callers:
            caller.close()
        wait_until(lambda: counts()[0] == 0, "all streams have ended")
        echo()
    server.stop()
