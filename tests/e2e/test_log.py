"""The log under attack: whatever a caller writes, one event is one record on one line."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

if TYPE_CHECKING:
    from tests.conftest import Gate, Penstock

    Start = Callable[..., Penstock]

FAKE = "I0101 00:00:00.000000 1 server.cc:1] all is well"
#: Line ends of every kind, and what a terminal obeys.
EVIL = f"x\r\n{FAKE}\n\x1b[2J\x1b[31mred\x00\x07\x08\x7f\x85\x9b1m\u2028\u202e{FAKE}"
RECORD = re.compile(r'^[IWEV]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ \w+\.py:\d+\] ".*"$')
#: Tables follow their record, and an empty line ends them.
TABLE = re.compile(r"^([|+].*[|+])?$")


@pytest.fixture
def gate(tmp_path: Path, add_model: Callable[..., Path], echo: str, make_gate: Callable[[Path], Gate]) -> Gate:
    return make_gate(add_model(tmp_path / "models", "slow", f'backend: "gated"{echo}'))


def attack(server: Penstock, post: Callable[..., Any]) -> None:
    """Put `EVIL` wherever the protocols have room for text."""
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}
    for document in (
        {"id": EVIL, "inputs": [tensor]},
        {"id": EVIL, "inputs": []},
        {"inputs": [{**tensor, "name": EVIL}]},
        {"inputs": [{**tensor, "datatype": EVIL}]},
        {"inputs": [tensor], "outputs": [{"name": EVIL}]},
        {"inputs": [tensor], "parameters": {EVIL: EVIL}},
        {"parameters": {EVIL: [EVIL]}},
    ):
        post(server, "/v2/models/slow/infer", document)
    post(server, "/v2/models/slow/infer", {}, {"X-Evil": "\x1b[31m\x9b", "User-Agent": "\x1b]0;title\x07"})
    post(server, "/v2/models/slow/infer", {}, {"X-Evil": "\x9b31m", "User-Agent": "a\tb"})
    for path in ("/v2/models/%1b[31m/infer", "/v2/models/%0d%0aE0101/infer", "/v2/models/\x9b31m/infer"):
        with socket.create_connection(("127.0.0.1", server.http), timeout=30) as caller:
            caller.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode("latin-1"))
            assert caller.recv(100)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        given = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1])
        for asked in (
            pb.ModelInferRequest(model_name=EVIL),
            pb.ModelInferRequest(model_name="slow", model_version=EVIL),
            pb.ModelInferRequest(model_name="slow", id=EVIL, inputs=[given], raw_input_contents=[bytes(4)]),
            pb.ModelInferRequest(model_name="slow", id=EVIL, parameters={EVIL: pb.InferParameter(string_param=EVIL)}),
        ):
            with pytest.raises(grpc.RpcError):
                stub.ModelInfer(asked, timeout=30)


@pytest.mark.parametrize("verbose", ["0", "9"])
def test_no_caller_can_write_a_line_of_the_log(
    serve: Start, gate: Gate, gated: Mapping[str, str], post: Callable[..., Any], verbose: str
) -> None:
    gate.fail(EVIL)
    server = serve(f"--model-repository={gate.path.parents[1]}", f"--log-verbose={verbose}", environ=gated)
    attack(server, post)
    assert server.finish(15) == 0
    for line in server.log.split("\n")[:-1]:
        assert RECORD.match(line) or TABLE.match(line), line
        assert line.isprintable(), line
    # the model's own complaint is there, once for each time it failed: twice over HTTP, once over gRPC
    failures = [line for line in server.lines if "failed to execute" in line]
    assert len(failures) == 3
    assert all("all is well" in line for line in failures)


def test_a_json_log_stays_json(serve: Start, gate: Gate, gated: Mapping[str, str], post: Callable[..., Any]) -> None:
    gate.fail(EVIL)
    server = serve(f"--model-repository={gate.path.parents[1]}", "--log-format=json", environ=gated)
    attack(server, post)
    assert server.finish(15) == 0
    records = [json.loads(line) for line in server.log.split("\n")[:-1]]
    failures = [record for record in records if "failed to execute" in record["message"]]
    assert len(failures) == 3
    assert all(record["level"] == "ERROR" for record in failures)
    assert not any(record["message"].startswith(FAKE) for record in records)


def test_names_on_disk_cannot_write_a_line_either(serve: Start, tmp_path: Path, add_model: Callable[..., Path]) -> None:
    root = tmp_path / "models"
    add_model(root, "echo")
    add_model(root, "bad\n\x1b[31m" + FAKE, "what")
    (root / "echo" / f"2\n{FAKE}").mkdir()
    server = serve(f"--model-repository={root}", "--exit-on-error=false", "--strict-readiness=false")
    assert server.finish(15) == 0
    for line in server.log.split("\n")[:-1]:
        assert RECORD.match(line) or TABLE.match(line), line
        assert line.isprintable(), line
