"""Loading and unloading over the network, by the stock clients and below them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace

IDENTITY = {
    "backend": "identity",
    "max_batch_size": 8,
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
}
ONE = np.ones((1, 4), np.float32)
EXPLICIT = "--model-control-mode=explicit"


def write_model(root: Path, name: str, backend: str = "identity") -> Path:
    """The version directory of a new model."""
    (root / name / "1").mkdir(parents=True)
    tensor = 'name: "{}" data_type: TYPE_FP32 dims: [ -1 ]'
    (root / name / "config.pbtxt").write_text(
        f'backend: "{backend}" max_batch_size: 8 input {{ {tensor.format("IN")} }} output {{ {tensor.format("OUT")} }}'
    )
    return root / name / "1"


@pytest.fixture(scope="module")
def controlled(keep_serving: Callable[..., Headrace], tmp_path_factory: pytest.TempPathFactory) -> Headrace:
    root = tmp_path_factory.mktemp("controlled")
    write_model(root, "plain")
    write_model(root, "other")
    return keep_serving(f"--model-repository={root}", EXPLICIT, environ={"TMPDIR": str(tmp_path_factory.mktemp("tmp"))})


@pytest.fixture(params=["http", "http.aio", "grpc", "grpc.aio"])
def client(request: pytest.FixtureRequest, connect: Any, controlled: Headrace) -> Any:
    return connect(request.param, controlled)


def test_a_client_loads_infers_and_unloads(client: Any, wait_until: Callable[..., None]) -> None:
    client.load_model("plain")
    assert client.is_model_ready("plain")
    np.testing.assert_array_equal(client.echo("plain", ONE, "FP32").as_numpy("OUT"), ONE)
    client.unload_model("plain", unload_dependents=True)
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'plain' has no available versions"):
        client.echo("plain", ONE, "FP32")

    def entry() -> Any:
        answer = client.metadata(client.get_model_repository_index())
        return next(each for each in (answer if client.is_http else answer["models"]) if each["name"] == "plain")

    wait_until(lambda: entry()["state"] == "UNAVAILABLE", "plain is unloaded")
    assert entry() == {"name": "plain", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}


def test_a_client_brings_another_config(client: Any) -> None:
    client.load_model("other", config=json.dumps({**IDENTITY, "max_batch_size": 3}))
    answer = client.metadata(client.get_model_config("other"))
    assert (answer if client.is_http else answer["config"])["max_batch_size"] == 3
    with pytest.raises(InferenceServerException, match="batch-size must be <= 3 for 'other'"):
        client.echo("other", np.ones((4, 4), np.float32), "FP32")


def test_a_client_brings_the_whole_model(client: Any) -> None:
    content = bytes(range(256)) * 2048
    client.load_model("brought", config=json.dumps(IDENTITY), files={"file:7/weights": content})
    answer = client.echo("brought", ONE, "FP32")
    response = answer.get_response()
    assert (response["model_version"] if client.is_http else response.model_version) == "7"
    client.unload_model("brought")
    with pytest.raises(
        InferenceServerException, match="failed to load 'brought', failed to poll from model repository"
    ):
        client.load_model("brought")


NAMES = ["..", "../plain", "plain/1", "/etc", "\\", "%2e%2e", "a\0b", "\u2215etc", "C:", "plain/ ", " ", "", "x" * 5000]
FILES = ["../x", "/../x", "1/../../x", "", ".", "a\0b", "x" * 300]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_no_name_leads_out_of_the_repository(controlled: Headrace, name: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{controlled.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), timeout=20)
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
        details = caught.value.details() or ""
        assert "no such file" not in details.lower()
        assert "model name" in details.lower() or details.endswith("failed to poll from model repository")


@pytest.mark.parametrize("name", FILES, ids=range(len(FILES)))
def test_no_file_leads_out_of_its_model(controlled: Headrace, name: str) -> None:
    parameters = {
        "config": pb.ModelRepositoryParameter(string_param=json.dumps(IDENTITY)),
        f"file:{name}": pb.ModelRepositoryParameter(bytes_param=b"x"),
    }
    request = pb.RepositoryModelLoadRequest(model_name="brought", parameters=parameters)
    with grpc.insecure_channel(f"127.0.0.1:{controlled.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.RepositoryModelLoad(request, timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Invalid file parameter 'file:" in (caught.value.details() or "")


def test_a_load_completes_after_its_client_disconnects(
    serve: Callable[..., Headrace],
    gated: Mapping[str, str],
    make_gate: Callable[[Path], Gate],
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    version = write_model(tmp_path, "slow", "gated")
    gate = make_gate(version)
    (version / "loading").touch()
    server = serve(f"--model-repository={tmp_path}", EXPLICIT, environ=gated)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        first = stub.RepositoryModelLoad.future(pb.RepositoryModelLoadRequest(model_name="slow"))
        gate.wait_until_loading()
        first.cancel()
        (version / "loading").unlink()
        wait_until(lambda: server.get("/v2/models/slow/ready")[0] == 200, "slow is loaded")


def test_sent_files_are_removed_after_kill_9_and_a_new_start(
    run_headrace: Callable[..., Headrace], connect: Any, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "tmp").mkdir()
    words, environ = (f"--model-repository={tmp_path / 'models'}", EXPLICIT), {"TMPDIR": str(tmp_path / "tmp")}

    def secrets() -> list[str]:
        return [path.name for path in (tmp_path / "tmp").rglob("secret-weights")]

    first = run_headrace(*words, environ=environ).wait_until_ready()
    connect("grpc", first).load_model("m", config=json.dumps(IDENTITY), files={"file:1/secret-weights": b"x"})
    assert secrets() == ["secret-weights"]
    assert first.finish(signal.SIGKILL) == -signal.SIGKILL
    assert secrets() == ["secret-weights"]
    second = run_headrace(*words, environ=environ).wait_until_ready()
    assert secrets() == []
    connect("grpc", second).load_model("m", config=json.dumps(IDENTITY), files={"file:1/secret-weights": b"x"})
    second.stop()
    left = [str(path.relative_to(tmp_path / "tmp")) for path in (tmp_path / "tmp").rglob("*")]
    assert [name for name in left if name not in (f"headrace-{os.geteuid()}", f"headrace-{os.geteuid()}/.lock")] == []


def test_unloading_answers_requests_in_flight(
    serve: Callable[..., Headrace],
    gated: Mapping[str, str],
    make_gate: Callable[[Path], Gate],
    connect: Any,
    tmp_path: Path,
) -> None:
    gate = make_gate(write_model(tmp_path, "slow", "gated"))
    server = serve(f"--model-repository={tmp_path}", EXPLICIT, "--load-model=slow", environ=gated)
    gate.close()
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1, 4])
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = pb.ModelInferRequest(model_name="slow", inputs=[tensor], raw_input_contents=[ONE.tobytes()])
        running = stub.ModelInfer.future(request)
        gate.wait_until_running()
        connect("grpc", server).unload_model("slow")
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
        assert caught.value.details() == "Request for unknown model: 'slow' has no available versions"
        gate.open()
        assert running.result(30).raw_output_contents[0] == ONE.tobytes()
