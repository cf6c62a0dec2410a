"""Slow clients do not delay the stop of a server, and every stream gets its end."""

from __future__ import annotations

import http.client
import json
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: A quarter of it, and three quarters of it, are what callers and streams have.
EXIT_TIMEOUT_S = 20
#: Between two bytes of a caller that drips.
DRIP_S = 0.2
HOSTS = [(), ("--http-server=hypercorn", "--grpc-server=grpcio")]
ENDED = "Server is stopping, the stream has ended before its last response"
#: Answers for as long as somebody listens.
ENDLESS = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            while not request.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]))
                time.sleep(0.1)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TENSORS = (
    'input { name: "IN" data_type: TYPE_%s dims: [-1] } output { name: "OUT" data_type: TYPE_%s dims: [-1] } '
    "instance_group { count: %d kind: KIND_CPU } "
)
LARGE = 64 << 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, config in (
        ("echo", 'backend: "identity" ' + TENSORS % ("UINT8", "UINT8", 1)),
        (
            "endless",
            'backend: "python" model_transaction_policy { decoupled: true } parameters { key: "isolation" value '
            '{ string_value: "thread" } } ' + TENSORS % ("FP32", "FP32", 4),
        ),
    ):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    (root / "endless/1/model.py").write_text(ENDLESS)
    return root


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Ends those who drip."""
    over = threading.Event()
    yield over
    over.set()


def connect(port: int, receive_bytes: int = 0) -> socket.socket:
    caller = socket.socket()
    if receive_bytes:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    caller.settimeout(60)
    caller.connect(("127.0.0.1", port))
    return caller


def drip(over: threading.Event, step: Callable[[], object]) -> None:
    """Take a ``step`` now and then, until the server has had enough of it."""

    def run() -> None:
        with suppress(OSError):
            while not over.wait(DRIP_S):
                step()

    threading.Thread(target=run, daemon=True).start()


def begin(port: int, what: str, over: threading.Event) -> socket.socket:
    """A caller that sends a head or a body, or takes an answer, a byte at a time."""
    if what == "answer":
        caller = connect(port, 4096)
        size = {"binary_data_size": LARGE}
        inputs = [{"name": "IN", "datatype": "UINT8", "shape": [LARGE], "parameters": size}]
        document = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        words = (
            f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(document) + LARGE}\r\n"
            f"Inference-Header-Content-Length: {len(document)}\r\n\r\n"
        )
        caller.sendall(words.encode() + document + bytes(LARGE))
        assert caller.recv(1)
        drip(over, lambda: caller.recv(1))
    else:
        caller = connect(port)
        head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: h\r\n"
        caller.sendall(head + b"X: " if what == "head" else head + b"Content-Length: 100000\r\n\r\n")
        drip(over, lambda: caller.send(b"x"))
    return caller


def stop(server: Headrace, within_s: float) -> None:
    began = time.monotonic()
    assert server.finish(signal.SIGTERM) == 0, server.log
    assert time.monotonic() - began < within_s
    assert "Traceback" not in server.log


@pytest.mark.parametrize("hosts", HOSTS, ids=["native", "others"])
@pytest.mark.parametrize("what", ["head", "body", "answer"])
def test_a_slow_sender_does_not_delay_the_stop(
    serve: Callable[..., Headrace], root: Path, over: threading.Event, hosts: tuple[str, ...], what: str
) -> None:
    server = serve(f"--model-repository={root}", f"--exit-timeout-secs={EXIT_TIMEOUT_S}", *hosts)
    with begin(server.http, what, over):
        stop(server, 0.75 * EXIT_TIMEOUT_S)


def test_a_slow_sender_on_the_metrics_port_does_not_delay_the_exit(
    serve: Callable[..., Headrace], root: Path, over: threading.Event
) -> None:
    server = serve(f"--model-repository={root}", f"--exit-timeout-secs={EXIT_TIMEOUT_S}")
    with begin(server.ports["Metrics Service"], "head", over):
        stop(server, 0.75 * EXIT_TIMEOUT_S)


@pytest.mark.parametrize("hosts", HOSTS, ids=["native", "others"])
def test_open_streams_are_ended_with_an_error(
    serve: Callable[..., Headrace], root: Path, hosts: tuple[str, ...]
) -> None:
    """Twenty streams of events, most of which wait for an instance, and one of gRPC."""
    server = serve(f"--model-repository={root}", f"--exit-timeout-secs={EXIT_TIMEOUT_S}", *hosts)
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]}).encode()
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with ExitStack() as stack:
        client = stack.enter_context(tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}"))
        # The system holds the events of every second caller, whose own buffer is full.
        callers = [stack.enter_context(connect(server.http, 4096 * (number % 2))) for number in range(20)]
        client.start_stream(lambda result, error: answers.put((result, error)))
        tensor = tritonclient.grpc.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        client.async_stream_infer("endless", [tensor])
        assert answers.get(timeout=60)[1] is None
        for caller in callers:
            caller.sendall(
                b"POST /v2/models/endless/events HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
        begun = bytearray()
        while b"data: " not in begun:  # some hosts send the head first
            some = callers[0].recv(1 << 16)
            assert some, bytes(begun)
            begun += some
        stop(server, 0.9 * EXIT_TIMEOUT_S)
        errors: list[Any] = []
        while not errors:
            errors += [error for _, error in [answers.get(timeout=10)] if error is not None]
        assert ENDED in str(errors[0]) or "shutting down" in str(errors[0])
        for caller in callers:
            received = bytearray()
            while some := caller.recv(1 << 16):
                received += some
            assert ENDED.encode() in received or b"Server is stopping" in received, bytes(received[-300:])
            assert received.endswith((b"0\r\n\r\n", b"}"))


@pytest.mark.parametrize("hosts", HOSTS, ids=["native", "others"])
def test_a_kept_alive_connection_is_served_for_a_short_time_and_the_log_counts_it(
    serve: Callable[..., Headrace], root: Path, hosts: tuple[str, ...]
) -> None:
    """Triton serves it until the end of the exit timeout, without announcing the close, and logs these lines."""
    server = serve(f"--model-repository={root}", f"--exit-timeout-secs={EXIT_TIMEOUT_S}", *hosts)
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)
    document = json.dumps({"inputs": [{"name": "IN", "datatype": "UINT8", "shape": [1], "data": [7]}]})
    for number in range(3):
        connection.request("POST", "/v2/models/echo/infer", document)
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Connection")) == (200, None)
        assert json.loads(answer.read())["outputs"][0]["data"] == [7]
        if not number:
            server.process.send_signal(signal.SIGINT)
            server.wait_for_line("Timeout 20: Found 1 HTTP service connections")
    began = time.monotonic()
    assert server.finish() == 0
    assert time.monotonic() - began < 0.75 * EXIT_TIMEOUT_S
    assert len(re.findall(r"Timeout \d+: Found 1 HTTP service connections", server.log)) > 1
    assert "Waiting for in-flight requests to complete." in server.log
    connection.close()
