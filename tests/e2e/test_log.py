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
    from tests.conftest import Gate, Headrace

    Start = Callable[..., Headrace]

FAKE = "I0101 00:00:00.000000 1 server.cc:1] all is well"
#: Line ends of every kind, and what a terminal obeys.
EVIL = f"x\r\n{FAKE}\n\x1b[2J\x1b[31mred\x00\x07\x08\x7f\x85\x9b1m\u2028\u202e{FAKE}"
RECORD = re.compile(r'^[IWEV]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ \w+\.py:\d+\] ".*"$')
#: Tables follow their record, and an empty line ends them.
TABLE = re.compile(r"^([|+].*[|+])?$")
#: A completed config follows its record, too, in protobuf's text.
CONFIG = re.compile(r"^ *(\w+: [^ ].*|\w+ \{|\})$")


@pytest.fixture
def gate(tmp_path: Path, add_model: Callable[..., Path], echo: str, make_gate: Callable[[Path], Gate]) -> Gate:
    return make_gate(add_model(tmp_path / "models", "slow", f'backend: "gated"{echo}'))


def attack(server: Headrace, post: Callable[..., Any]) -> None:
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
        input_tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1])
        for request in (
            pb.ModelInferRequest(model_name=EVIL),
            pb.ModelInferRequest(model_name="slow", model_version=EVIL),
            pb.ModelInferRequest(model_name="slow", id=EVIL, inputs=[input_tensor], raw_input_contents=[bytes(4)]),
            pb.ModelInferRequest(model_name="slow", id=EVIL, parameters={EVIL: pb.InferParameter(string_param=EVIL)}),
        ):
            with pytest.raises(grpc.RpcError):
                stub.ModelInfer(request, timeout=30)


@pytest.mark.parametrize("verbose", ["0", "9"])
def test_no_caller_can_write_a_line_of_the_log(
    serve: Start, gate: Gate, gated: Mapping[str, str], post: Callable[..., Any], verbose: str
) -> None:
    gate.fail(EVIL)
    server = serve(f"--model-repository={gate.path.parents[1]}", f"--log-verbose={verbose}", environ=gated)
    attack(server, post)
    assert not CONFIG.match(FAKE)
    assert server.finish(15) == 0
    for line in server.log.split("\n")[:-1]:
        assert RECORD.match(line) or TABLE.match(line) or CONFIG.match(line), line
        assert line.isprintable(), line
    # the model's own complaint is there, once for each time it failed: twice over HTTP, once over gRPC;
    # and once more for each request for it
    failures = [line for line in server.lines if "failed to execute" in line]
    assert len([line for line in failures if "Traceback" in line]) == 3
    assert len([line for line in failures if "Infer failed: " in line]) == 3
    assert len(failures) == 6
    assert all("all is well" in line for line in failures)


def test_a_json_log_stays_json(serve: Start, gate: Gate, gated: Mapping[str, str], post: Callable[..., Any]) -> None:
    gate.fail(EVIL)
    server = serve(f"--model-repository={gate.path.parents[1]}", "--log-format=json", environ=gated)
    attack(server, post)
    assert server.finish(15) == 0
    records = [json.loads(line) for line in server.log.split("\n")[:-1]]
    failures = [record for record in records if "failed to execute" in record["message"]]
    assert len(failures) == 6
    assert all(record["level"] == "ERROR" for record in failures)
    assert all(record["model"] == "slow" for record in failures)
    assert not any(record["message"].startswith(FAKE) for record in records)


HOSTS = {"native": (), "others": ("--http-server=hypercorn", "--grpc-server=grpcio")}
INPUT = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}


def ask_wrongly(server: Headrace, post: Callable[..., Any]) -> None:
    """Seven requests that are their callers' fault, each with the id ``id-of-<number>`` where it has one."""
    post(server, "/v2/models/slow/infer", {"id": "id-of-1", "inputs": [{**INPUT, "name": "NO"}]})
    post(server, "/v2/models/slow/versions/9/infer", {"id": "id-of-2", "inputs": [INPUT]})
    post(server, "/v2/models/none/infer", {"id": "id-of-3", "inputs": [INPUT]})
    post(server, "/v2/nowhere", {})
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(pb.ModelInferRequest(model_name="slow", id="id-of-5"), timeout=30)
        streamed = stub.ModelStreamInfer(iter([pb.ModelInferRequest(model_name="slow", id="id-of-6")]), timeout=30)
        assert next(streamed).error_message
        with pytest.raises(grpc.RpcError):
            stub.ModelMetadata(pb.ModelMetadataRequest(name="none"), timeout=30)


def fail_inside(server: Headrace, post: Callable[..., Any]) -> None:
    """Three requests at which the model fails."""
    assert post(server, "/v2/models/slow/infer", {"id": "id-of-8", "inputs": [INPUT]}).status == 500
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1])
    request = pb.ModelInferRequest(model_name="slow", id="id-of-9", inputs=[tensor], raw_input_contents=[bytes(4)])
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(request, timeout=30)
        assert "failed to execute" in next(stub.ModelStreamInfer(iter([request]), timeout=30)).error_message


@pytest.mark.parametrize("host", list(HOSTS))
def test_a_failed_request_is_a_line_where_the_log_is_verbose(
    serve: Start, gate: Gate, gated: Mapping[str, str], post: Callable[..., Any], host: str
) -> None:
    gate.fail("broken")
    words = ("--log-verbose=1", "--log-format=json", *HOSTS[host])
    server = serve(f"--model-repository={gate.path.parents[1]}", *words, environ=gated)
    ask_wrongly(server, post)
    fail_inside(server, post)
    assert server.finish(15) == 0
    records = [json.loads(line) for line in server.log.split("\n")[:-1]]
    failed = [record for record in records if record["logger"] == "headrace.requests" and "code" in record]
    by_caller = [record for record in failed if record["level"] == "VERBOSE"]
    assert len(by_caller) == 7
    assert {record.get("request_id") for record in by_caller} == {None, *(f"id-of-{n}" for n in (1, 2, 3, 5, 6))}
    first = by_caller[0]
    assert (first["model"], first["code"], first["request_id"]) == ("slow", "Invalid argument", "id-of-1")
    assert first["message"].startswith("[request id: id-of-1] Infer failed: unexpected inference input 'NO' for model")
    assert (by_caller[1]["model"], by_caller[1]["version"]) == ("slow", "9")
    inside = [record for record in failed if record["level"] == "ERROR"]
    assert [record["request_id"] for record in inside] == ["id-of-8", "id-of-9", "id-of-9"]
    assert all("ValueError: broken" in record["message"] for record in inside)


@pytest.mark.parametrize("host", list(HOSTS))
def test_only_the_servers_own_faults_are_lines_where_it_is_not(
    serve: Start, gate: Gate, gated: Mapping[str, str], post: Callable[..., Any], host: str
) -> None:
    gate.fail("broken")
    server = serve(f"--model-repository={gate.path.parents[1]}", *HOSTS[host], environ=gated)
    ask_wrongly(server, post)
    assert not [line for line in server.lines if " failed: " in line]
    fail_inside(server, post)
    assert server.finish(15) == 0
    failures = [line for line in server.lines if "Infer failed: " in line]
    assert len(failures) == 3
    assert all(line.startswith("E") for line in failures)
    assert all("(Internal, model 'slow'" in line for line in failures)


def test_a_model_that_always_fails_does_not_fill_the_log(
    serve: Start, gate: Gate, gated: Mapping[str, str], post: Callable[..., Any]
) -> None:
    gate.fail("broken")
    server = serve(f"--model-repository={gate.path.parents[1]}", environ=gated)
    for _ in range(100):
        assert post(server, "/v2/models/slow/infer", {"inputs": [INPUT]}).status == 500
    assert server.finish(15) == 0
    for kind in ("Traceback", "Infer failed: "):
        assert 10 <= len([line for line in server.lines if kind in line]) <= 40  # 10 in 10 s; the machine may be slow
    left_out = [int(line.split('"')[1].split()[0]) for line in server.lines if "lines like this were left out" in line]
    written = [line for line in server.lines if "failed to execute" in line and "left out" not in line]
    assert len(written) + sum(left_out) == 200


def test_verbose_lines_are_tritons(serve: Start, tmp_path: Path, add_model: Callable[..., Path], infer: Any) -> None:
    """Texts and levels as Triton 2.51 has them with ``--log-verbose=1``."""
    add_model(tmp_path / "models", "echo")
    server = serve(f"--model-repository={tmp_path / 'models'}", "--log-verbose=1")
    infer(server)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1])
        stub.ModelInfer(pb.ModelInferRequest(model_name="echo", inputs=[tensor], raw_input_contents=[bytes(4)]))
        stub.ServerLive(pb.ServerLiveRequest())
    assert server.finish(15) == 0
    for text in (
        "HTTP request: 0 /v2/health/ready",
        "HTTP request: 2 /v2/models/echo/infer",
        "New request handler for ModelInferHandler, 0",
        "Process for ModelInferHandler, rpc_ok=1, 0 step START",
        "Process for ModelInferHandler, rpc_ok=1, 0 step COMPLETE",
        "Done for ModelInferHandler, 0",
        "Process for ServerLive, rpc_ok=1, 0 step START",
        "Done for ServerLive, 0",
        "Ready for RPC 'ModelInfer', 0",
    ):
        assert any(f'"{text}"' in line for line in server.lines), text


def test_the_steps_of_loading_are_tritons(
    serve: Start, tmp_path: Path, add_model: Callable[..., Path], echo: str, post: Callable[..., Any]
) -> None:
    """Texts and levels as Triton 2.51 has them with ``--log-verbose=2``."""
    warm = (
        'model_warmup { name: "first" batch_size: 1 count: 2 '
        'inputs { key: "IN" value { data_type: TYPE_FP32 dims: [1] zero_data: true } } }'
    )
    config = f'backend: "identity" max_batch_size: 4 dynamic_batching {{}} {echo} {warm}'
    add_model(tmp_path / "models", "echo", config)
    isolated = f'{config} parameters {{ key: "isolation" value {{ string_value: "process" }} }}'
    add_model(tmp_path / "models", "apart", isolated)
    words = (f"--model-repository={tmp_path / 'models'}", "--model-control-mode=explicit", "--load-model=*")
    levels = {}
    for level in (1, 2):
        server = serve(*words, f"--log-verbose={level}")
        for name in ("echo", "apart"):
            assert post(server, f"/v2/repository/models/{name}/unload", {}).status == 200
        assert server.finish(15) == 0
        levels[level] = server.lines
    for name in ("echo", "apart"):
        for text, shown_from in (
            (f"AsyncLoad() '{name}'", 2),
            (f"loading: {name}:1", 1),
            (f"CreateModel() '{name}' version 1", 2),
            ("Server side auto-completed config: ", 1),
            (f"model '{name}' instance {name}_0 is running warmup sample 'first' for iteration 1", 1),
            (f"model '{name}' instance {name}_0 is running warmup sample 'first' for iteration 2", 1),
            (f"Starting dynamic-batcher thread for {name} at nice 0...", 1),
            (f"OnLoadComplete() '{name}' version 1", 2),
            (f"OnLoadFinal() '{name}' for all version(s)", 2),
            (f"AsyncUnload() '{name}'", 2),
            (f"OnDestroy callback() '{name}' version 1", 2),
            (f"successfully unloaded '{name}' version 1", 1),
        ):
            for level in (1, 2):
                lines = [line for line in levels[level] if f'"{text}"' in line]
                assert bool(lines) == (level >= shown_from), (text, level)


CHATTY = """
import logging, sys, warnings
from headrace import Backend, Instance, hookimpl

own = logging.getLogger("a_plugin_of_mine")
ours = logging.getLogger("headrace.chatty")

class Chatty(Backend):
    name = "chatty"
    def load(self, model):
        print("loading", model.name)
        own.warning("a line of my own logger")
        ours.debug("a verbose line")
        return Echo(model.name)

class Echo(Instance):
    def __init__(self, name):
        self.name = name
    def execute(self, inputs):
        print("no newline", end="")
        print("to stderr", file=sys.stderr)
        print(" of", self.name)
        logging.getLogger("a_plugin_of_mine").error("I said so")
        warnings.warn("mind this", stacklevel=1)
        return {"OUT": inputs["IN"]}

@hookimpl
def register_backends():
    return [Chatty]
"""


@pytest.fixture
def chatty(tmp_path: Path, add_model: Callable[..., Path], echo: str) -> Mapping[str, str]:
    """The environment in which models ``inside`` and ``apart`` print and log, in a thread and in a process."""
    site = tmp_path / "site"
    info = site / "chatty-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "chatty.py").write_text(CHATTY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chatty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace]\nchatty = chatty\n")
    add_model(tmp_path / "models", "inside", f'backend: "chatty"{echo}')
    process = 'parameters { key: "isolation" value { string_value: "process" } }'
    add_model(tmp_path / "models", "apart", f'backend: "chatty"{echo}{process}')
    return {"PYTHONPATH": str(site)}


def test_every_line_of_a_json_log_is_a_record_that_names_its_model(
    serve: Start, tmp_path: Path, chatty: Mapping[str, str], infer: Any
) -> None:
    words = (f"--model-repository={tmp_path / 'models'}", "--log-format=json", "--log-verbose=1")
    server = serve(*words, environ=chatty, interactive=True)
    for model in ("inside", "apart"):
        infer(server, model)
    assert server.finish(15) == 0
    assert server.process.stdout is not None
    printed = [json.loads(line) for line in server.process.stdout.read().splitlines()]
    logged = [json.loads(line) for line in server.log.split("\n")[:-1]]
    for model in ("inside", "apart"):
        of_model = [record["message"] for record in printed if record.get("model") == model]
        assert of_model == [f"loading {model}", f"no newline of {model}"]
        for logger, text in (("stderr", "to stderr"), ("headrace.chatty", "a verbose line")):
            records = [r for r in logged if r.get("model") == model and r["message"] == text]
            assert records, (model, text)
            assert records[0]["logger"] == logger or model == "apart"
        for text in ("a line of my own logger", "I said so", "mind this"):
            assert [r for r in logged if r.get("model") == model and text in r["message"]], (model, text)


def test_prints_stay_as_they_are_in_the_text_formats(
    serve: Start, tmp_path: Path, chatty: Mapping[str, str], infer: Any
) -> None:
    server = serve(f"--model-repository={tmp_path / 'models'}", environ=chatty, interactive=True)
    infer(server, "apart")
    assert server.finish(15) == 0
    assert server.process.stdout is not None
    assert b"loading apart\n" in server.process.stdout.read()
    assert any("a_plugin_of_mine" in line or "a line of my own logger" in line for line in server.lines)


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
