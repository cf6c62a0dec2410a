"""A real server with one model per thing to be seen, the four stock clients, and callers below them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy.typing as npt
import onnx
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace

#: Data type on the wire to that of the config.
DATATYPES = {
    **{f"{kind}{bits}": f"TYPE_{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)},
    "BOOL": "TYPE_BOOL",
    "FP16": "TYPE_FP16",
    "BF16": "TYPE_BF16",
    "FP32": "TYPE_FP32",
    "FP64": "TYPE_FP64",
    "BYTES": "TYPE_STRING",
}
MAX_INPUT_BYTES = 1 << 20


def identity(inputs: Mapping[str, tuple[str, str]], batch: int = 0, rest: str = "", output: str = "") -> str:
    """A config whose outputs repeat the inputs: ``inputs`` maps a name to data type and dims."""
    lines = [f'backend: "identity"\nmax_batch_size: {batch}']
    for name, (datatype, dims) in inputs.items():
        lines.append(f'input {{ name: "{name}" data_type: {datatype} {dims} }}')
        shown = dims.replace("optional: true", "")
        lines.append(f'output {{ name: "{name.replace("IN", "OUT")}" data_type: {datatype} {shown} {output} }}')
    return "\n".join([*lines, rest])


QUEUE = """
dynamic_batching {
  max_queue_delay_microseconds: 0
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy {
    timeout_action: REJECT default_timeout_microseconds: 60000000 allow_timeout_override: true max_queue_size: 2
  }
}
"""
CONFIGS: dict[str, str] = {
    **{f"echo_{wire.lower()}": identity({"IN": (name, "dims: [-1]")}) for wire, name in DATATYPES.items()},
    "batched": identity({"IN": ("TYPE_FP32", "dims: [4]")}, 8, "dynamic_batching {}"),
    "rows": identity({"IN": ("TYPE_INT64", "dims: [2]")}, 16, "dynamic_batching { max_queue_delay_microseconds: 500 }\n"
                     "instance_group { count: 2 kind: KIND_CPU }"),
    "pair": identity({"IN0": ("TYPE_FP32", "dims: [2]"), "IN1": ("TYPE_FP32", "dims: [2]")}, 8),
    "matrix": identity({"IN": ("TYPE_INT32", "dims: [-1, 3]")}),
    "reshaped": identity({"IN": ("TYPE_FP32", "dims: [4] reshape { shape: [2, 2] }")}, 4),
    "scalar": identity({"IN": ("TYPE_FP32", "dims: [1] reshape { shape: [] }")}, 4),
    "optional": identity({"IN0": ("TYPE_FP32", "dims: [2]"), "IN1": ("TYPE_FP32", "dims: [2] optional: true")}, 4),
    "classes": identity({"IN": ("TYPE_FP32", "dims: [4]")}, 8, output='label_filename: "labels.txt"'),
    "classes_flat": identity({"IN": ("TYPE_INT32", "dims: [-1]")}),
    "huge": identity({"IN": ("TYPE_UINT8", "dims: [-1]")}),
    "versions": identity({"IN": ("TYPE_FP32", "dims: [4]")}, rest="version_policy { all {} }"),
    "cached": identity({"IN": ("TYPE_FP32", "dims: [4]")}, 8, "response_cache { enable: true }"),
    "cached_strings": identity({"IN": ("TYPE_STRING", "dims: [-1]")}, rest="response_cache { enable: true }"),
    "slow": identity({"IN": ("TYPE_FP32", "dims: [4]")}, 4, "dynamic_batching {}").replace("identity", "gated"),
    "queue": identity({"IN": ("TYPE_FP32", "dims: [4]")}, 1, QUEUE).replace("identity", "gated"),
}  # fmt: skip
LABELS = ["ant", "bee", "cat"]  # the fourth class has none


def write_add(folder: Path) -> None:
    """X + Y and X - Y of f32[rows, 16], without a config."""
    tensors = [
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["rows", 16]) for n in ("X", "Y", "SUM", "DIFF")
    ]
    nodes = [onnx.helper.make_node("Add", ["X", "Y"], ["SUM"]), onnx.helper.make_node("Sub", ["X", "Y"], ["DIFF"])]
    graph = onnx.helper.make_graph(nodes, "add", tensors[:2], tensors[2:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        for version in ("1", "3") if name == "versions" else ("1",):
            (root / name / version).mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    (root / "classes" / "labels.txt").write_text("\n".join(LABELS) + "\n")
    write_add(root / "add")
    return root


@pytest.fixture(scope="session")
def flags(repository: Path) -> list[str]:
    limits = [f"--http-max-input-size={MAX_INPUT_BYTES}", "--cache-config=local,size=1000000"]
    return [f"--model-repository={repository}", *limits]


@pytest.fixture(scope="session")
def server(keep_serving: Callable[..., Headrace], flags: list[str], gated: Mapping[str, str]) -> Headrace:
    """The server as it is by default."""
    return keep_serving(*flags, environ=gated)


@pytest.fixture(scope="session")
def hypercorn(keep_serving: Callable[..., Headrace], flags: list[str], gated: Mapping[str, str]) -> Headrace:
    return keep_serving(*flags, "--http-server=hypercorn", environ=gated)


class HeldExecution(NamedTuple):
    """A model whose one instance executes a request and does not go on before `release`."""

    gate: Gate
    running: Any

    def release(self) -> None:
        self.gate.open()
        assert len(self.running.result(30).raw_output_contents[0]) == 16


@pytest.fixture(scope="session")
def gates(repository: Path, make_gate: Callable[[Path], Gate]) -> dict[str, Gate]:
    return {name: make_gate(repository / name / "1") for name in ("slow", "queue")}


@pytest.fixture
def hold(gates: dict[str, Gate]) -> Iterator[Callable[[Any, str], HeldExecution]]:
    """Occupies the one instance of a model: ``hold(stub, model)``. Later requests wait in the queue."""

    executions: list[HeldExecution] = []

    def hold(stub: Any, model: str) -> HeldExecution:
        gates[model].close()
        tensor = service_pb2.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1, 4])
        request = service_pb2.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[bytes(16)])
        running = stub.ModelInfer.future(request)
        gates[model].wait_until_running()
        executions.append(HeldExecution(gates[model], running))
        return executions[-1]

    yield hold
    for each in executions:  # a test that failed frees the instance for the next one
        each.gate.open()
        with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
            each.running.result(30)


@pytest.fixture(scope="session", params=["server", "hypercorn"])
def http_server(request: pytest.FixtureRequest) -> Headrace:
    """Both hosts, for tests of HTTP."""
    host: Headrace = request.getfixturevalue(request.param)
    return host


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The text of an error, whose body has this one key and nothing else."""
        document = json.loads(self.body)
        assert list(document) == ["error"], document
        text: str = document["error"]
        return text


@pytest.fixture(scope="session")
def send() -> Callable[..., Reply]:
    """One HTTP request over a connection of its own: ``send(server, method, path, body, headers)``.

    A body that is not bytes becomes JSON.
    """

    def send(
        server: Headrace, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=30)
        try:
            content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
                connection.request(method, path, content, dict(headers or {}))
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    return send


@pytest.fixture
def stub(server: Headrace, gates: object) -> Iterator[Any]:
    """The generated gRPC stub, below the client."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


class Client:
    """One of the four stock clients, called as if it were blocking."""

    def __init__(self, name: str, module: ModuleType, url: str) -> None:
        self.name, self.module = name, module
        self.is_http = name.startswith("http")
        self._loop = asyncio.new_event_loop() if name.endswith(".aio") else None
        self.client = self._run(lambda: module.InferenceServerClient(url))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._run(lambda: getattr(self.client, method)(*args, **kwargs))

    def input(self, name: str, array: npt.NDArray[Any], datatype: str, **how: Any) -> Any:
        tensor = self.module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array, **how)
        return tensor

    def output(self, name: str, **how: Any) -> Any:
        return self.module.InferRequestedOutput(name, **how)

    def metadata(self, answer: Any) -> Any:
        """``answer`` of a method about the server, as a dictionary."""
        if self.is_http:
            return answer
        from google.protobuf import json_format

        return json_format.MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )

    def echo(self, model: str, array: npt.NDArray[Any], datatype: str, **how: Any) -> Any:
        """Return the answer of the identity model ``model`` to IN=``array``."""
        return self.infer(model, [self.input("IN", array, datatype)], **how)

    def close(self) -> None:
        self._run(lambda: self.client.close())
        if self._loop:
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    def _run(self, call: Callable[[], Any]) -> Any:
        if self._loop is None:
            return call()

        async def run() -> Any:
            answer = call()
            return await answer if inspect.isawaitable(answer) else answer

        return self._loop.run_until_complete(run())


MODULES = {
    "http": tritonclient.http,
    "http.aio": tritonclient.http.aio,
    "grpc": tritonclient.grpc,
    "grpc.aio": tritonclient.grpc.aio,
}


@pytest.fixture(scope="session")
def connect() -> Iterator[Callable[[str, Headrace], Client]]:
    """Makes, and closes, a client: ``connect("http.aio", server)``. The same arguments give the same client."""
    clients: dict[tuple[str, int], Client] = {}

    def connect(name: str, server: Headrace) -> Client:
        port = server.http if name.startswith("http") else server.grpc
        if (name, port) not in clients:
            clients[name, port] = Client(name, MODULES[name], f"127.0.0.1:{port}")
        return clients[name, port]

    yield connect
    for client in clients.values():
        client.close()


OVER_HTTP = ["http", "http.aio", "http hypercorn", "http.aio hypercorn"]


@pytest.fixture(params=[*OVER_HTTP, "grpc", "grpc.aio"])
def client(request: pytest.FixtureRequest, connect: Callable[[str, Headrace], Client]) -> Client:
    """Every stock client, the HTTP ones against both hosts."""
    name, _, host = request.param.partition(" ")
    return connect(name, request.getfixturevalue(host or "server"))


@pytest.fixture(params=OVER_HTTP)
def http_client(request: pytest.FixtureRequest, connect: Callable[[str, Headrace], Client]) -> Client:
    name, _, host = request.param.partition(" ")
    return connect(name, request.getfixturevalue(host or "server"))


@pytest.fixture(scope="session")
def identity_of_triton(keep_serving: Callable[..., Headrace], tmp_path_factory: pytest.TempPathFactory) -> Headrace:
    """Serves, on another backend, the one model that the recorded Triton served."""
    repository = tmp_path_factory.mktemp("triton")
    (repository / "pyident" / "1").mkdir(parents=True)
    (repository / "pyident" / "config.pbtxt").write_text(
        'backend: "identity" max_batch_size: 64 dynamic_batching { } '
        'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } '
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }'
    )
    return keep_serving(f"--model-repository={repository}")
