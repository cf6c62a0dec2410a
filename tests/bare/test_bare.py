"""A server in an environment with the requirements of Headrace, and without extras and plugins.

The session `bare` of the noxfile runs this without them installed. In other environments they are hidden from the
server.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import pytest

from headrace.distributions import EXTRAS
from headrace_grpc import grpc_service_pb2 as pb
from headrace_grpc import health_pb2, reflection_pb2

ANSWER_S = 20.0
HIDDEN = sorted({*EXTRAS, "grpc_health", "grpc_reflection"})
#: The program of the command ``headrace``, without the modules in ``HIDDEN``.
PROGRAM = f"""
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in {HIDDEN!r}
        return None if hidden else self.finder.find_spec(name, path, target)

    def find_distributions(self, context):
        found = getattr(self.finder, "find_distributions", lambda context: ())(context)
        return [each for each in found if not each.metadata["Name"].startswith("headrace-")]

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]

from headrace_cli import main

sys.exit(main(sys.argv[1:]))
"""
CONFIG = """
backend: "identity"
input {{ name: "x" data_type: TYPE_{kind} dims: [2] }}
output {{ name: "y" data_type: TYPE_{kind} dims: [2] }}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("FP32", "BF16"):
        (folder / kind.lower() / "1").mkdir(parents=True)
        (folder / kind.lower() / "config.pbtxt").write_text(CONFIG.format(kind=kind))
    return folder


def words(repository: Path, *flags: str) -> list[str]:
    ends = [f"--{port}-{what}" for port in ("http", "grpc", "metrics") for what in ("address=127.0.0.1", "port=0")]
    return [sys.executable, "-c", PROGRAM, "serve", f"--model-repository={repository}", *ends, *flags]


class Bare:
    """Return the ports by service, and the log."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self.ports: dict[str, int] = {}
        self._process = process
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self) -> None:
        assert self._ready.wait(ANSWER_S), "".join(self.lines)
        assert len(self.ports) == 3, "".join(self.lines)

    def close(self) -> None:
        self._process.terminate()
        assert self._process.wait(ANSWER_S) == 0
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as log:
            for line in log:
                self.lines.append(line)
                if match := re.search(r"Started (\w+)(?: Service)? at [\d.]+:(\d+)", line):
                    self.ports[match[1]] = int(match[2])
                    if len(self.ports) == 3:
                        self._ready.set()
        self._ready.set()


@contextmanager
def running(repository: Path) -> Iterator[Bare]:
    with subprocess.Popen(words(repository), stderr=subprocess.PIPE, text=True) as process:
        bare = Bare(process)
        try:
            bare.wait()
            yield bare
        finally:
            bare.close()


@pytest.fixture(scope="module")
def bare(repository: Path) -> Iterator[Bare]:
    with running(repository) as running_server:
        yield running_server


def call(port: int, path: str, message: bytes) -> bytes:
    """The first message that the RPC answers; asserts that its status is 0."""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
        client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        client.initiate_connection()
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        client.send_headers(1, [*fields, ("te", "trailers"), ("content-type", "application/grpc")])
        client.send_data(1, b"\0" + struct.pack(">I", len(message)) + message, end_stream=True)
        connection.sendall(client.data_to_send())
        body, status = b"", ""
        while not status:
            received = connection.recv(65536)
            assert received, "the server closed the connection"
            for event in client.receive_data(received):
                if isinstance(event, h2.events.DataReceived):
                    body += event.data
                elif isinstance(event, h2.events.TrailersReceived):
                    status = {str(name): str(value) for name, value in event.headers}["grpc-status"]
            connection.sendall(client.data_to_send())
    assert status == "0"
    return body[5:]


def test_http_answers(bare: Bare) -> None:
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, -2.0]}]}
    url = f"http://127.0.0.1:{bare.ports['HTTPService']}/v2/models/fp32/infer"
    with urllib.request.urlopen(url, json.dumps(document).encode(), timeout=ANSWER_S) as answer:
        assert json.load(answer)["outputs"][0]["data"] == [1.5, -2.0]


@pytest.mark.parametrize(("model", "data"), [("fp32", struct.pack("<2f", 1.5, -2.0)), ("bf16", b"\xc0\x3f\x00\xc0")])
def test_grpc_answers_and_carries_types_that_numpy_lacks(bare: Bare, model: str, data: bytes) -> None:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[data])
    request.inputs.add(name="x", datatype=model.upper(), shape=[2])
    body = call(bare.ports["GRPCInferenceService"], "/inference.GRPCInferenceService/ModelInfer",
                request.SerializeToString())  # fmt: skip
    answer = pb.ModelInferResponse.FromString(body)
    assert list(answer.raw_output_contents) == [data]
    assert answer.outputs[0].datatype == model.upper()


def test_health_and_reflection_need_no_distribution_of_grpc(bare: Bare) -> None:
    port = bare.ports["GRPCInferenceService"]
    health = call(port, "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest().SerializeToString())
    assert health_pb2.HealthCheckResponse.FromString(health).status == health_pb2.HealthCheckResponse.SERVING
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    body = call(port, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", question.SerializeToString())
    answer = reflection_pb2.ServerReflectionResponse.FromString(body)
    assert "grpc.health.v1.Health" in [service.name for service in answer.list_services_response.service]


def test_metrics_answer(bare: Bare) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{bare.ports['Metrics']}/metrics", timeout=ANSWER_S) as answer:
        assert b"nv_inference_request_success" in answer.read()


def test_a_model_with_bf16_is_logged_once(bare: Bare) -> None:
    [line] = [line for line in bare.lines if "BF16" in line]
    assert "model 'bf16' has BF16 tensors" in line
    assert "pip install 'headrace[bf16]'" in line


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        ("--grpc-server=grpcio", "headrace-grpcio"),
        ("--http-server=hypercorn", "headrace-hypercorn"),
        ("--http-header-forward-pattern=x-.*", "'headrace[re2]'"),
        ("--grpc-header-forward-pattern=x-.*", "'headrace[re2]'"),
    ],
)
def test_a_flag_of_a_missing_package_names_it_in_one_line(repository: Path, flag: str, wanted: str) -> None:
    done = subprocess.run(words(repository, flag), capture_output=True, text=True, timeout=ANSWER_S, check=False)
    assert done.returncode == 1
    hints = [line for line in done.stderr.splitlines() if f"pip install {wanted}" in line]
    assert len(hints) == 1, done.stderr
    assert "Traceback" not in done.stderr
