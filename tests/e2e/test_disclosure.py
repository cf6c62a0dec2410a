"""Paths of the machine are in the log. They are in answers only if the server is verbose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace

    Start = Callable[..., Headrace]

HOSTS = {"native": (), "others": ("--http-server=hypercorn", "--grpc-server=grpcio")}
TENSOR = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def gate(root: Path, add_model: Callable[..., Path], echo: str, make_gate: Callable[[Path], Gate]) -> Gate:
    """A model that fails with a path in its error, beside one whose config does not parse."""
    add_model(root, "broken", "what")
    gate = make_gate(add_model(root, "slow", f'backend: "gated"{echo}'))
    gate.fail(f"cannot open '{gate.path}/private key.pem' nor {gate.path}/weights.bin: denied")
    return gate


@pytest.fixture(params=list(HOSTS))
def start(request: pytest.FixtureRequest, serve: Start, gated: Mapping[str, str], root: Path, gate: Gate) -> Start:
    def start(*words: str) -> Headrace:
        words = ("--exit-on-error=false", "--strict-readiness=false", *HOSTS[request.param], *words)
        return serve(f"--model-repository={root}", *words, environ=gated)

    return start


def told_over_http(server: Headrace, post: Callable[..., Any]) -> Iterator[str]:
    yield post(server, "/v2/models/slow/infer", {"inputs": [TENSOR]}).error
    index = json.loads(post(server, "/v2/repository/index", {}).body)
    yield from (entry["reason"] for entry in index if entry["name"] == "broken")


def told_over_grpc(server: Headrace) -> Iterator[str]:
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1])
    request = pb.ModelInferRequest(model_name="slow", inputs=[tensor], raw_input_contents=[bytes(4)])
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(request, timeout=30)
        yield str(refused.value.details())
        yield next(stub.ModelStreamInfer(iter([request]), timeout=30)).error_message
        index = stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=30).models
        yield from (entry.reason for entry in index if entry.name == "broken")


def test_answers_and_reasons_have_no_path_of_the_machine(
    start: Start, post: Callable[..., Any], root: Path, gate: Gate
) -> None:
    server = start()
    texts = [*told_over_http(server, post), *told_over_grpc(server)]
    assert len(texts) == 5
    assert not [text for text in texts if str(root.parent) in text or "/models" in text]
    executed = [text for text in texts if "failed to execute" in text]
    assert len(executed) == 3
    assert all("cannot open '.../private key.pem' nor .../weights.bin: denied" in text for text in executed)
    assert all(".../config.pbtxt" in text for text in texts if text not in executed)
    assert server.finish(15) == 0
    assert f"{gate.path}/weights.bin" in server.log
    assert f"{root}/broken/config.pbtxt" in server.log


def test_a_verbose_server_answers_with_whole_paths(start: Start, post: Callable[..., Any], root: Path) -> None:
    server = start("--log-verbose=1")
    texts = [*told_over_http(server, post), *told_over_grpc(server)]
    assert len(texts) == 5
    assert all(str(root) in text for text in texts)
    assert server.finish(15) == 0


def test_a_removed_repository_is_not_named_in_full(start: Start, post: Callable[..., Any], root: Path) -> None:
    server = start("--model-control-mode=explicit", "--load-model=slow")
    shutil.rmtree(root)
    for path in ("/v2/repository/index", "/v2/repository/models/slow/load"):
        reply = post(server, path, {})
        assert reply.status == 400
        assert "failed to stat file .../models" in reply.error
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError, match=r"failed to stat file \.\.\./models"):
            stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=30)
