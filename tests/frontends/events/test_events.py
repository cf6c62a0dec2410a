"""Server-sent events of a decoupled model in a process of its own: a real server, both HTTP hosts, raw sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

DEADLINE_S = 90.0
HOSTS = ("--http-server=native", "--http-server=hypercorn")
#: A decoupled model that answers with 0, 1, 2, ... in ``COUNT`` responses of ``SIZE`` numbers, says in a file how far
#: it has come, and fails behind the last if ``COUNT`` is odd.
MODEL = """
import pathlib

import numpy as np
import triton_python_backend_utils as pb_utils

HERE = pathlib.Path(__file__).parent


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            given = [pb_utils.get_input_tensor_by_name(request, name) for name in ("COUNT", "SIZE")]
            count, size = (int(each.as_numpy()[0]) for each in given)
            for number in range(count):
                if request.is_cancelled():
                    (HERE / "cancelled").write_text("yes")
                    break
                tensor = pb_utils.Tensor("N", np.full(size, number, np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
                (HERE / "sent").write_text(str(number + 1))
            failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("odd"))
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            sender.send(failed, flags=flags) if count % 2 else sender.send(flags=flags)
"""
CONFIG = """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "COUNT" data_type: TYPE_INT32 dims: [1] } input { name: "SIZE" data_type: TYPE_INT32 dims: [1] }
output { name: "N" data_type: TYPE_INT32 dims: [-1] }
"""
ECHO = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""


def write(path: Path) -> Path:
    for name, config in (("count", CONFIG), ("echo", ECHO)):
        (path / name / "1").mkdir(parents=True)
        (path / name / "config.pbtxt").write_text(config)
    (path / "count/1/model.py").write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models"))


@pytest.fixture
def repository(models: Path) -> Path:
    """Return a repository whose models have no statistics yet."""
    for name in ("sent", "cancelled"):
        (models / "count/1" / name).unlink(missing_ok=True)
    return models


@pytest.fixture(scope="module", params=HOSTS)
def server(request: pytest.FixtureRequest, models: Path, keep_serving: Callable[..., Headrace]) -> Headrace:
    return keep_serving(f"--model-repository={models}", request.param).wait_until_ready()


class Client:
    """Reads when it is told to."""

    def __init__(self, port: int) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(("127.0.0.1", port))
        self.received = bytearray()

    def ask(self, document: object, path: str = "/v2/models/count/events", more: str = "") -> Client:
        body = json.dumps(document).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{more}Content-Length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)
        return self

    def count(self, number: int, size: int = 1) -> Client:
        return self.ask({"inputs": [tensor("COUNT", number), tensor("SIZE", size)]})

    def until(self, wanted: bytes) -> bytearray:
        while wanted not in self.received[-(1 << 21) :]:
            some = self.socket.recv(1 << 20)
            assert some, self.received
            self.received += some
        return self.received

    def to_the_end(self) -> tuple[bytes, bytes]:
        """Head, and body without its chunks."""
        while some := self.socket.recv(1 << 20):
            self.received += some
        head, _, rest = bytes(self.received).partition(b"\r\n\r\n")
        if b"chunked" not in head.lower():
            return head, rest
        body, begin = bytearray(), 0
        while begin < len(rest):
            end = rest.index(b"\r\n", begin)
            size, begin = int(rest[begin:end], 16), end + 2
            body += rest[begin : begin + size]
            begin += size + 2
        return head, bytes(body)


def tensor(name: str, value: int) -> dict[str, Any]:
    return {"name": name, "datatype": "INT32", "shape": [1], "data": [value]}


@pytest.fixture
def connect(server: Headrace) -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []

    def connect() -> Client:
        clients.append(Client(server.http))
        return clients[-1]

    yield connect
    for client in clients:
        client.socket.close()


Connect = Callable[[], Client]


def numbers(body: bytes) -> list[int]:
    """The first number of each event."""
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event.startswith(b"data: ")]
    return [json.loads(event)["outputs"][0]["data"][0] for event in events]


def sent(repository: Path) -> int:
    file = repository / "count/1/sent"
    return int(file.read_text() or 0) if file.exists() else 0


def test_each_response_of_a_decoupled_model_is_an_event(connect: Connect) -> None:
    head, body = connect().count(500).to_the_end()
    assert head.startswith(b"HTTP/1.1 200")
    assert b"content-type: text/event-stream" in head.lower()
    assert numbers(body) == list(range(500))


def test_the_one_response_of_another_model_is_one_event(connect: Connect) -> None:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    for path in ("/v2/models/echo/events", "/v2/models/echo/versions/1/events"):
        _, body = connect().ask({"id": "7", "inputs": [given]}, path).to_the_end()
        assert json.loads(body.removeprefix(b"data: ")) == {
            "id": "7",
            "model_name": "echo",
            "model_version": "1",
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [1.0, 2.0, 3.0]}],
        }


@pytest.mark.parametrize(
    ("document", "path", "status", "text"),
    [
        ({"inputs": []}, "/v2/models/count/events", 400, "expected 2 inputs but got 0"),
        ({}, "/v2/models/count/events", 500, "Unable to parse 'inputs'"),
        ({"inputs": []}, "/v2/models/none/events", 404, "unknown model"),
        ({"inputs": []}, "/v2/models/echo/versions/2/events", 404, "unknown model"),
    ],
)
def test_what_is_refused_has_a_status(connect: Connect, document: object, path: str, status: int, text: str) -> None:
    head, body = connect().ask(document, path).to_the_end()
    assert (int(head[9:12]), text in json.loads(body)["error"]) == (status, True), body


@pytest.mark.parametrize(
    ("value", "status", "text"),
    [
        ("0", 503, "Request timeout expired"),
        ("1.5", 400, "header 'Request-Timeout-Ms' is '1.5', expected 1 to 10 digits"),
    ],
)
def test_a_time_that_is_none_is_refused_as_by_infer(connect: Connect, value: str, status: int, text: str) -> None:
    head, body = connect().ask({"inputs": []}, more=f"Request-Timeout-Ms: {value}\r\n").to_the_end()
    assert (int(head[9:12]), json.loads(body)["error"]) == (status, text)


def test_events_end_when_the_time_is_over_that_the_header_gives(
    wait_until: Callable[..., None], connect: Connect, repository: Path
) -> None:
    document = {"inputs": [tensor("COUNT", 2_000_000_000), tensor("SIZE", 1)]}
    head, body = connect().ask(document, more="Request-Timeout-Ms: 300\r\n").to_the_end()
    assert body.endswith(b'{"error":"Request timeout expired"}' + b"\n\n" * head.startswith(b"HTTP/1.1 200"))
    wait_until(lambda: (repository / "count/1/cancelled").exists(), "the model has heard of it")


def test_a_failure_before_the_first_response_is_a_status_and_behind_it_an_event(connect: Connect) -> None:
    _, body = connect().count(3).to_the_end()
    assert numbers(body) == [0, 1, 2]
    assert body.endswith(b'event: error\ndata: {"error":"odd"}\n\n')
    head, body = connect().count(-1).to_the_end()
    assert (head[9:10], json.loads(body)) == (b"5", {"error": "odd"})


def test_a_caller_who_does_not_read_stops_the_model_and_gets_all_later(
    server: Headrace, connect: Connect, repository: Path
) -> None:
    client = connect().count(400, size=50_000)  # of about 100 kB
    client.until(b"data: ")
    before = -1
    while before != sent(repository):  # it has not come further while ever so much else is answered
        before = sent(repository)
        for _ in range(300):
            server.get("/v2/health/ready")
    assert before < 200
    assert numbers(client.to_the_end()[1]) == list(range(400))


@pytest.mark.parametrize("reads", [False, True])
def test_a_caller_who_leaves_cancels_the_request(
    wait_until: Callable[..., None], connect: Connect, repository: Path, reads: bool
) -> None:
    client = connect().count(1_000_000, size=1 if reads else 50_000)
    client.until(b"data: ")
    client.socket.close()
    wait_until(lambda: (repository / "count/1/cancelled").exists(), "the model has heard of it")


@pytest.mark.parametrize("host", HOSTS)
def test_a_server_that_stops_sends_what_is_left(serve: Callable[..., Headrace], tmp_path: Path, host: str) -> None:
    server = serve(f"--model-repository={write(tmp_path)}", host).wait_until_ready()
    client = Client(server.http).count(300, size=50_000)
    with client.socket:
        client.until(b"data: ")
        server.process.terminate()
        server.wait_for_line("stopping")
        assert numbers(client.to_the_end()[1]) == list(range(300))
