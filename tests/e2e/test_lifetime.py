"""A server from its start to its end, as its operator sees it: exit codes, signals, log lines."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace

    Start = Callable[..., Headrace]
    AddModel = Callable[..., Path]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def gate(root: Path, add_model: AddModel, echo: str, make_gate: Callable[[Path], Gate]) -> Gate:
    """The gate of the model ``slow`` in ``root``."""
    return make_gate(add_model(root, "slow", f'backend: "gated"{echo}'))


def ask(server: Headrace, model: str, count: int) -> Callable[..., list[Any]]:
    """Send ``count`` gRPC requests. The returned function waits for their answers, or for the expected errors."""
    channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc}")
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[2])
    request = pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[bytes(8)])
    calls = [stub.ModelInfer.future(request) for _ in range(count)]

    def answers(errors: bool = False) -> list[Any]:
        with channel:
            if errors:
                return [call.exception(30) for call in calls]
            return [call.result(30).raw_output_contents[0] for call in calls]

    return answers


# ---------------------------------------------------------------------- the end


@pytest.mark.parametrize("http_host", ["native", "hypercorn"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_in_flight_are_answered_before_the_exit(
    serve: Start, root: Path, gate: Gate, gated: Mapping[str, str], infer: Any, number: int, http_host: str
) -> None:
    """Requests that run and requests that wait, over both protocols."""
    server = serve(f"--model-repository={root}", f"--http-server={http_host}", environ=gated)
    gate.close()
    with ThreadPoolExecutor(2) as pool:
        over_http = [pool.submit(infer, server, "slow") for _ in range(2)]
        answers = ask(server, "slow", 2)
        gate.wait_until_running()
        server.wait_until_pending("slow", 3)
        server.process.send_signal(number)
        server.wait_for_line("stopping")
        gate.open()
        assert [answer.result(30) for answer in over_http] == [[1.0, 2.0]] * 2
        assert answers() == [bytes(8)] * 2
    assert server.finish() == 0
    assert "Traceback" not in server.log


def is_closed(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        return False  # it was closing just then
    return False


def test_new_callers_are_turned_away_while_the_server_drains(
    serve: Start,
    root: Path,
    gate: Gate,
    gated: Mapping[str, str],
    infer: Any,
    wait_until: Callable[..., None],
) -> None:
    server = serve(f"--model-repository={root}", environ=gated)
    gate.close()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(infer, server, "slow")
        gate.wait_until_running()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("stopping")
        wait_until(lambda: is_closed(server.http) and is_closed(server.grpc), "the ports are closed")
        gate.open()
        assert running.result(30) == [1.0, 2.0]
    assert server.finish() == 0


def test_idle_connections_do_not_hold_the_exit(serve: Start, root: Path, add_model: AddModel) -> None:
    add_model(root, "echo")
    server = serve(f"--model-repository={root}")
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=30)
    connection.request("GET", "/v2/health/live")
    connection.getresponse().read()  # and kept alive
    half = socket.create_connection(("127.0.0.1", server.http))
    half.sendall(b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\n")
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        grpc.channel_ready_future(channel).result(30)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("stopping")
        half.close()
        assert server.finish() == 0
    connection.close()


@pytest.mark.parametrize("http_host", ["native", "hypercorn"])
def test_kept_alive_connections_are_served_while_others_are_answered_and_end_with_them(
    serve: Start,
    root: Path,
    gate: Gate,
    gated: Mapping[str, str],
    infer: Any,
    http_host: str,
    wait_until: Callable[..., None],
) -> None:
    """As in Triton, which continues until the end of the exit timeout (tests/e2e/test_stopping.py)."""
    server = serve(f"--model-repository={root}", f"--http-server={http_host}", environ=gated)
    connections = [http.client.HTTPConnection("127.0.0.1", server.http, timeout=30) for _ in range(2)]
    for connection in connections:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
    gate.close()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(infer, server, "slow")
        gate.wait_until_running()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("stopping")
        wait_until(lambda: is_closed(server.http), "the port is closed")
        connections[0].request("GET", "/v2")
        answer = connections[0].getresponse()
        assert answer.status == 200
        answer.read()
        gate.open()
        assert running.result(30) == [1.0, 2.0]
    assert server.finish() == 0
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("http_host", ["native", "hypercorn"])
def test_a_caller_who_has_stopped_sending_does_not_hold_the_exit(
    serve: Start, root: Path, add_model: AddModel, http_host: str, wait_until: Callable[..., None]
) -> None:
    add_model(root, "echo")
    server = serve(f"--model-repository={root}", f"--http-server={http_host}")
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\n"
    with contextlib.ExitStack() as stack:
        for sent in (head, head + b"Content-Length: 9\r\n\r\n", b"", b"P"):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.http))).sendall(sent)
        assert server.get("/v2/health/live")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.process.poll() is not None, "the server ends", 20)
        assert server.finish() == 0


LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n"


@pytest.mark.parametrize("http_host", ["native", "hypercorn"])
@pytest.mark.parametrize("rest", [b"", LIVE], ids=["whole", "and a part"])
def test_pipelined_requests_do_not_hold_the_exit(
    serve: Start, root: Path, add_model: AddModel, http_host: str, rest: bytes, wait_until: Callable[..., None]
) -> None:
    add_model(root, "echo")
    server = serve(f"--model-repository={root}", f"--http-server={http_host}")
    request = LIVE + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    count = (1 << 15) // len(request)
    with socket.create_connection(("127.0.0.1", server.http), timeout=30) as caller:
        caller.sendall(request * count + rest)
        answer = caller.recv(1 << 16)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(ConnectionResetError):
            while piece := caller.recv(1 << 16):
                answer += piece
        answers = answer.count(b"HTTP/1.1 ")
        assert 0 < answers <= count + bool(rest)
        # A server that answers all requests before it handles the signal has no answer left for the header.
        assert answers == count or b"\r\nconnection: close\r\n" in answer[answer.rindex(b"HTTP/1.1 ") :].lower()
        wait_until(lambda: server.process.poll() is not None, "the server ends", 20)
    assert server.finish() == 0


@pytest.mark.parametrize("http_host", ["native", "hypercorn"])
def test_a_caller_who_leaves_behind_pipelined_requests_does_not_hold_the_exit(
    serve: Start, root: Path, add_model: AddModel, http_host: str, wait_until: Callable[..., None]
) -> None:
    add_model(root, "echo")
    server = serve(f"--model-repository={root}", f"--http-server={http_host}")
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.http), timeout=30) as caller:
            caller.sendall((LIVE + b"\r\n") * 900)
            assert caller.recv(1)
    assert server.get("/v2/health/live")[0] == 200
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.process.poll() is not None, "the server ends", 20)
    assert server.finish() == 0


@pytest.mark.parametrize("hosts", [(), ("--http-server=hypercorn", "--grpc-server=grpcio")])
def test_the_exit_timeout_ends_what_does_not_end_with_code_1_and_answers_every_caller(
    run_headrace: Start, root: Path, gate: Gate, gated: Mapping[str, str], post: Any, hosts: tuple[str, ...]
) -> None:
    flags = (f"--model-repository={root}", "--exit-timeout-secs=1", *hosts)
    server = run_headrace(*flags, environ=gated).wait_until_ready()
    gate.close()
    document = {"inputs": [{"name": "IN", "shape": [2], "datatype": "FP32", "data": [1.0, 2.0]}]}
    with ThreadPoolExecutor(2) as pool:
        over_http = [pool.submit(post, server, "/v2/models/slow/infer", document) for _ in range(2)]
        answers = ask(server, "slow", 2)
        gate.wait_until_running()
        server.wait_until_pending("slow", 3)
        assert server.finish(signal.SIGTERM) == 1
        assert "Exit timeout expired. Exiting immediately." in server.log
        replies = [reply.result(30) for reply in over_http]
        assert [(reply.status, "Server is stopping" in reply.error) for reply in replies] == [(503, True)] * 2
        errors = answers(errors=True)
        assert [(each.code(), "Server is stopping" in each.details()) for each in errors] == [
            (grpc.StatusCode.UNAVAILABLE, True)
        ] * 2


# ---------------------------------------------------------------------- the start


@pytest.mark.parametrize("protocol", ["http", "grpc", "metrics"])
def test_a_port_in_use_is_named_and_ends_the_start_with_code_1(
    run_headrace: Start, root: Path, add_model: AddModel, protocol: str
) -> None:
    add_model(root, "echo")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = run_headrace(f"--model-repository={root}", f"--{protocol}-port={port}")
        assert server.finish() == 1
    assert re.search(rf"error: creating server: .*127\.0\.0\.1:{port}.* in use", server.log)
    assert "Traceback" not in server.log


BROKEN = {
    "no_onnx": ("model.onnx", b"this is no model", ""),
    "empty_onnx": ("model.onnx", b"", ""),
    "no_file": ("readme.txt", b"", 'backend: "onnxruntime" input { name: "X" data_type: TYPE_FP32 dims: [1] } '
                'output { name: "Y" data_type: TYPE_FP32 dims: [1] }'),
    "no_backend": ("x", b"", 'backend: "nowhere"'),
    "bad_config": ("x", b"", 'backend: "identity" max_batch_sise: 4'),
}  # fmt: skip


@pytest.fixture
def broken(root: Path, add_model: AddModel) -> Path:
    """A repository with one good model, and every bad one of `BROKEN`."""
    add_model(root, "echo")
    for name, (file, content, config) in BROKEN.items():
        (add_model(root, name, config) / file).write_bytes(content)
    return root


def test_a_broken_model_ends_the_start_with_code_1_and_its_reason(run_headrace: Start, broken: Path) -> None:
    server = run_headrace(f"--model-repository={broken}")
    assert server.finish() == 1
    assert "error: creating server: Internal - failed to load all models" in server.log
    assert "Traceback" not in server.log
    for name in BROKEN:
        assert re.search(rf"^\| {name} .*\| UNAVAILABLE: \w", server.log, re.MULTILINE), name
    assert re.search(r"^\| no_backend .*nowhere", server.log, re.MULTILINE)
    assert re.search(r"^\| bad_config .*max_batch_sise", server.log, re.MULTILINE)


def test_the_others_are_served_when_asked_so(serve: Start, broken: Path, post: Any, infer: Any) -> None:
    flags = ("--exit-on-error=false", "--strict-readiness=false")
    server = serve(f"--model-repository={broken}", *flags)
    assert infer(server) == [1.0, 2.0]
    index = {entry["name"]: entry for entry in json.loads(post(server, "/v2/repository/index", {}).body)}
    assert index["echo"]["state"] == "READY"
    for name in BROKEN:
        assert (index[name]["state"], bool(index[name]["reason"])) == ("UNAVAILABLE", True)
        reply = post(server, f"/v2/models/{name}/infer", {"inputs": []})
        assert (reply.status, reply.error[:27]) == (404, "Request for unknown model: ")


def test_a_model_that_failed_makes_a_strict_server_not_ready_but_live(run_headrace: Start, broken: Path) -> None:
    server = run_headrace(f"--model-repository={broken}", "--exit-on-error=false")
    server.wait_for_line("Started Metrics Service")
    assert server.get("/v2/health/ready") == (400, b"")
    assert server.get("/v2/health/live") == (200, b"")
    assert server.get("/v2/models/echo/ready") == (200, b"")
    server.stop()


def test_a_model_of_two_repositories_is_served_from_neither(
    run_headrace: Start, tmp_path: Path, add_model: AddModel, post: Any, infer: Any
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, name in ((one, "echo"), (one, "both"), (two, "both")):
        add_model(folder, name)
    flags = [f"--model-repository={one}", f"--model-repository={two}"]
    server = run_headrace(*flags, "--exit-on-error=false")
    server.wait_for_line("Started Metrics Service")
    assert infer(server) == [1.0, 2.0]
    index = json.loads(post(server, "/v2/repository/index", {}).body)
    reason = "model appears in two or more repositories"
    assert {"name": "both", "state": "UNAVAILABLE", "reason": reason} in index
    assert post(server, "/v2/models/both/infer", {"inputs": []}).status == 404
    server.stop()


# ---------------------------------------------------------------------- while the models are being loaded

REFUSED = "Server not ready: its models are still being loaded"


@pytest.fixture
def loading(root: Path, add_model: AddModel, gate: Gate) -> Gate:
    """The gate of ``slow``, of which the load does not end; ``echo``, beside it, is loaded at once."""
    add_model(root, "echo")
    (gate.path / "loading").touch()
    return gate


@pytest.mark.parametrize("hosts", [(), ("--http-server=hypercorn", "--grpc-server=grpcio")])
def test_a_server_that_loads_is_live_and_not_ready_and_refuses_requests_to_models(
    run_headrace: Start,
    root: Path,
    loading: Gate,
    gated: Mapping[str, str],
    post: Any,
    infer: Any,
    wait_until: Callable[..., None],
    hosts: tuple[str, ...],
) -> None:
    flags = (f"--model-repository={root}", "--model-control-mode=explicit", "--load-model=*", *hosts)
    server = run_headrace(*flags, environ=gated).wait_until_listening()
    loading.wait_until_loading()
    server.wait_for_line("successfully loaded 'echo'")
    assert server.get("/v2/health/live") == (200, b"")
    assert server.get("/v2/health/ready") == (400, b"")
    assert json.loads(server.get("/v2")[1])["name"] == "triton"
    assert server.get("/metrics", server.ports["Metrics Service"])[0] == 200
    paths = ("", "/ready", "/config", "/stats", "/versions/1")
    for path in [f"/v2/models/{name}{path}" for name in ("echo", "slow", "nobody") for path in paths]:
        status, body = server.get(path)
        assert (path, status, json.loads(body)) == (path, 503, {"error": REFUSED})
    assert server.get("/v2/models/stats")[0] == 503
    refused = ("models/echo/infer", "repository/index", "repository/models/echo/load", "repository/models/echo/unload")
    for path in refused:
        reply = post(server, f"/v2/{path}", {"inputs": []})
        assert (path, reply.status, reply.error) == (path, 503, REFUSED)
    assert server.get("/v2/nonsense")[0] == 404

    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        assert not stub.ServerReady(pb.ServerReadyRequest()).ready
        assert stub.ServerMetadata(pb.ServerMetadataRequest()).name == "triton"
        calls: list[tuple[Any, Any]] = [
            (stub.ModelInfer, pb.ModelInferRequest(model_name="echo")),
            (stub.ModelMetadata, pb.ModelMetadataRequest(name="echo")),
            (stub.ModelConfig, pb.ModelConfigRequest(name="echo")),
            (stub.ModelStatistics, pb.ModelStatisticsRequest()),
            (stub.RepositoryIndex, pb.RepositoryIndexRequest()),
            (stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name="echo")),
            (stub.RepositoryModelUnload, pb.RepositoryModelUnloadRequest(model_name="echo")),
        ]
        for call, request in calls:
            with pytest.raises(grpc.RpcError) as refusal:
                call(request)
            assert (refusal.value.code(), refusal.value.details()) == (grpc.StatusCode.UNAVAILABLE, REFUSED)
        answers = stub.ModelStreamInfer(iter([pb.ModelInferRequest(model_name="echo")]))
        assert [answer.error_message for answer in answers] == [REFUSED]
        tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[2])
        wanted = pb.ModelInferRequest(model_name="echo", inputs=[tensor], raw_input_contents=[bytes(8)])
        assert "Started" not in server.log
        (loading.path / "loading").unlink()
        server.wait_for_line("Started Metrics Service")
        wait_until(lambda: server.get("/v2/health/ready")[0] == 200, "the server is ready")
        assert stub.ModelInfer(wanted).raw_output_contents == [bytes(8)]  # on the connection of before
    assert infer(server) == [1.0, 2.0]
    server.stop()


def test_a_signal_ends_a_loading_server_and_its_loaded_models_in_order(
    run_headrace: Start, root: Path, loading: Gate, gated: Mapping[str, str], wait_until: Callable[..., None]
) -> None:
    server = run_headrace(f"--model-repository={root}", environ=gated).wait_until_listening()
    loading.wait_until_loading()
    server.wait_for_line("successfully loaded 'echo'")
    assert server.finish(signal.SIGTERM) == 0
    assert "successfully unloaded 'echo' version 1" in server.log
    assert "Traceback" not in server.log
    assert is_closed(server.http)


def test_a_port_in_use_is_reported_before_anything_is_loaded(
    run_headrace: Start, root: Path, loading: Gate, gated: Mapping[str, str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = run_headrace(f"--model-repository={root}", f"--http-port={taken.getsockname()[1]}", environ=gated)
        assert server.finish() == 1  # although the load never ends
    assert not (loading.path / "seen").exists()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_port_that_is_shared_with_another_server_is_not_taken_before_the_models_are_loaded(
    run_headrace: Start, root: Path, loading: Gate, gated: Mapping[str, str], protocol: str
) -> None:
    """The other one answers meanwhile: callers must not be sent to one that cannot."""
    service = {"http": "HTTPService", "grpc": "GRPCInferenceService"}[protocol]
    server = run_headrace(f"--model-repository={root}", f"--reuse-{protocol}-port=1", environ=gated)
    server.wait_for_line("Metrics Service listens")
    loading.wait_until_loading()
    assert len(server.ports) == 2
    assert service not in server.ports
    (loading.path / "loading").unlink()
    server.wait_until_ready().stop()
    assert f"Started {service} at" in server.log


@pytest.mark.parametrize("flag", ["--model-control-mode=none", "--model-control-mode=poll"])
def test_a_server_without_its_repository_is_up_and_not_live_when_asked_so(
    run_headrace: Start, tmp_path: Path, post: Any, flag: str
) -> None:
    """As Triton's."""
    server = run_headrace(f"--model-repository={tmp_path / 'nowhere'}", "--exit-on-error=false", flag)
    server.wait_for_line("Started Metrics Service")
    assert "repository path is not a valid directory" in server.log
    assert server.get("/v2/health/live") == (400, b"")
    assert server.get("/v2/health/ready") == (400, b"")
    assert json.loads(server.get("/v2")[1])["name"] == "triton"
    assert server.get("/metrics", server.ports["Metrics Service"])[0] == 200
    for reply in (server.get("/v2/models/a"), server.get("/v2/models/stats"), post(server, "/v2/repository/index", {})):
        assert (reply[0], json.loads(reply[1])) == (503, {"error": "Server not ready"})
    server.stop()


NAMES = ["$(touch marker)", "`touch marker`", "a;touch marker", "-rf", "a'b", 'a"b', "a&b|c", "a b"]


def test_names_are_never_commands(
    serve: Start, root: Path, add_model: AddModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, post: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        add_model(root, name)
    server = serve(f"--model-repository={root}")
    index = {entry["name"]: entry["state"] for entry in json.loads(post(server, "/v2/repository/index", {}).body)}
    assert index == dict.fromkeys(NAMES, "READY")
    server.stop()
    assert not list(tmp_path.rglob("marker"))


# ---------------------------------------------------------------------- on a machine that fails


def test_a_server_that_loses_its_volume_serves_what_it_has_loaded(
    run_headrace: Start, root: Path, add_model: AddModel, post: Any, infer: Any
) -> None:
    add_model(root, "echo")
    add_model(root, "later")
    server = run_headrace(f"--model-repository={root}", "--model-control-mode=explicit", "--load-model=echo")
    server.wait_until_ready()
    away = root.rename(root.with_name("away"))
    assert infer(server) == [1.0, 2.0]
    for name in ("later", "echo"):
        refusal = post(server, f"/v2/repository/models/{name}/load", {})
        assert (refusal.status, refusal.error.split(": ")[1]) == (400, "repository path is not a valid directory")
    assert infer(server) == [1.0, 2.0]
    assert server.get("/v2/health/ready")[0] == server.get("/v2/health/live")[0] == 200
    away.rename(root)
    assert post(server, "/v2/repository/models/later/load", {}).status == 200
    assert infer(server, "later") == [1.0, 2.0]
    server.stop()


def test_two_signals_in_a_burst_cut_no_answer(run_headrace: Start, root: Path, add_model: AddModel) -> None:
    """Each of ten connections has whole answers, all of them right, and then its end. It was seen with 10,000, too."""
    add_model(root, "echo")
    server = run_headrace(f"--model-repository={root}").wait_until_ready()
    body = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[3]}]}'
    one = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def burst(answered: asyncio.Event) -> tuple[int, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http)
        writer.write(one * 300)
        received = await reader.read(1)
        answered.set()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                received += data
        writer.close()
        replies = [reply.partition(b"\r\n\r\n") for reply in received.split(b"HTTP/1.1 ")[1:]]
        whole = [(head[:3], json.loads(content)) for head, _, content in replies]
        assert {status for status, _ in whole} <= {b"200", b"503"}
        right = [content for status, content in whole if status == b"200"]
        assert all(content["outputs"][0]["data"] == [3] for content in right)
        return len(right), len(whole) - len(right)

    async def run() -> list[tuple[int, int]]:
        answered = asyncio.Event()
        bursts = [asyncio.ensure_future(burst(answered)) for _ in range(10)]
        await answered.wait()
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        return [await each for each in bursts]

    found = asyncio.run(run())
    assert server.finish() == 0, server.log
    assert sum(right for right, _ in found) > 0
    assert "Traceback" not in server.log
    assert not server.complaints, found
