"""Requests create no garbage that only the garbage collector finds: a server without cycles need not collect any.

A plugin runs the collector of a real server and counts the garbage. ``HEADRACE_REQUESTS=100000`` has as many requests
of each kind as that put to it, which takes hours; a cycle in every second request shows at 60 as well.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: Per kind.
REQUESTS = int(os.environ.get("HEADRACE_REQUESTS", "60"))
PLUGIN = """
import asyncio, gc, json
from collections import Counter
import numpy as np
from headrace import Extension, HttpReply, HttpRoute, hookimpl

def circle(start, garbage):
    # The shortest way from `start` back to it.
    came, ends = {id(start): None}, [start]
    for at in ends:
        for to in gc.get_referents(at):
            if to is start:
                way = []
                while at is not None:
                    way.append(repr(at)[:100])
                    at = came[id(at)]
                return way[::-1]
            if id(to) in garbage and id(to) not in came:
                came[id(to)] = at
                ends.append(to)
    return []

class Begin(HttpRoute):
    name = "POST /garbage/begin"
    async def answer(self, call):
        gc.collect()
        gc.disable()
        return HttpReply(200)

class Count(HttpRoute):
    name = "POST /garbage/count"
    async def answer(self, call):
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        garbage = set(map(id, gc.garbage))
        ways = [way for each in gc.garbage[:100] if (way := circle(each, garbage))]
        gc.garbage.clear()
        gc.collect()
        return HttpReply(200, parts=[json.dumps([found, min(ways, key=len, default=[])]).encode()])

ONE = {"IN": np.ones((1, 4), np.float32)}
SERVERS = []

class Infer(HttpRoute):
    name = "POST /garbage/infer"
    async def answer(self, call):
        await asyncio.to_thread(SERVERS[0].infer, "plain", ONE)
        return HttpReply(200)

class InferAsync(HttpRoute):
    name = "POST /garbage/infer_async"
    async def answer(self, call):
        await SERVERS[0].infer_async("plain", ONE)
        return HttpReply(200)

class Refused(HttpRoute):
    name = "POST /garbage/refused"
    async def answer(self, call):
        await SERVERS[0].infer_async("nobody", ONE)

@hookimpl
def server_started(server):
    SERVERS.append(server)

class Garbage(Extension):
    name = "garbage"
    adds = (Begin, Count, Infer, InferAsync, Refused)

@hookimpl
def register_extensions():
    return [Garbage]
"""
SHAPES = """
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""
IDENTITY = f'backend: "identity" max_batch_size: 8 {SHAPES}'
PYTHON = (
    f'backend: "python" max_batch_size: 8 {SHAPES} parameters {{ key: "isolation" value {{ string_value: "%s" }} }}'
)
DECOUPLED = "model_transaction_policy { decoupled: true }"
STEP = """step { model_name: "plain" model_version: -1 input_map { key: "IN" value: "%s" }
output_map { key: "OUT" value: "%s" } }"""
#: No request waits this long: each is removed from that queue in another way.
FOR_EVER = "max_queue_delay_microseconds: 600000000 preferred_batch_size: 8"
CONFIGS = {
    "plain": f"{IDENTITY} dynamic_batching {{}}",
    "loop": IDENTITY + 'parameters { key: "event_loop" value { string_value: "on" } }',
    "strings": IDENTITY.replace("FP32", "STRING"),
    "cached": f"{IDENTITY} response_cache {{ enable: true }}",
    "waits": f"{IDENTITY} dynamic_batching {{ {FOR_EVER} }}",
    "expires": f"""{IDENTITY} dynamic_batching {{ {FOR_EVER}
        default_queue_policy {{ timeout_action: REJECT default_timeout_microseconds: 100 }} }}""",
    "direct": f"{IDENTITY} sequence_batching {{ direct {{}} }}",
    "oldest": f"{IDENTITY} sequence_batching {{ oldest {{ max_candidate_sequences: 4 }} }}",
    "ensemble": f'platform: "ensemble" max_batch_size: 8 {SHAPES} ensemble_scheduling {{ {STEP} {STEP} }}'
    % ("IN", "between", "between", "OUT"),
}
MODULES = {
    "echoes": """
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value(each))]) for each in requests]
""",
    "cycles": """
        cycle = []
        cycle.append(cycle)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value(each))]) for each in requests]
""",
    "raises": """
        raise ValueError("as ever")
""",
    "fails": """
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("as ever")) for each in requests]
""",
    "asks": """
        asked = [
            pb_utils.InferenceRequest(
                model_name="plain", requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", value(each))]
            ).exec()
            for each in requests
        ]
        return [
            pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(each, "OUT")]) for each in asked
        ]
""",
    "streams": """
        for each in requests:
            sender = each.get_response_sender()
            for _ in range(2):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value(each))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
}
#: In a process it counts garbage from a request that finds a file ``begin`` to one that finds ``count``.
MODULE = """
import gc
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

HERE = Path(__file__).parent

def value(request):
    return pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()

def look():
    if (HERE / "begin").exists():
        (HERE / "begin").unlink()
        gc.collect()
        gc.disable()
    if (HERE / "count").exists():
        (HERE / "count").unlink()
        (HERE / "found").write_text(str(gc.collect()))

class TritonPythonModel:
    def execute(self, requests):
        look()
"""
MODELS = {
    **CONFIGS,
    **{
        f"{name}_{where}": PYTHON % where
        + ("model_transaction_policy { decoupled: true }" if name == "streams" else "")
        for name in MODULES
        for where in ("thread", "process")
    },
}


def tensor(values: Iterable[float] = (1, 2, 3, 4), **parameters: Any) -> dict[str, Any]:
    data = list(values)
    return {"name": "IN", "datatype": "FP32", "shape": [1, len(data)], "data": data, "parameters": parameters}


class Caller:
    """One connection over HTTP and one channel over gRPC. ``number`` is that of the request."""

    def __init__(self, server: Headrace) -> None:
        self.server, self.number = server, 0
        self.connection = self.connect()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc}")

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.server.http), timeout=90)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def close(self) -> None:
        self.connection.close()
        self.channel.close()

    def head(self, path: str, size: int, headers: Mapping[str, object]) -> bytes:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {path} HTTP/1.1\r\nHost: h\r\n{lines}Content-Length: {size}\r\n\r\n".encode()

    def post(self, path: str, body: bytes = b"", status: int = 200, **headers: object) -> bytes:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.sendall(self.head(path, len(body), named) + body)
        with self.connection.makefile("rb") as stream:
            line = stream.readline()
            size = 0
            while (header := stream.readline()) != b"\r\n":
                if header.lower().startswith(b"content-length:"):
                    size = int(header.split(b":")[1])
            content = stream.read(size)
        assert int(line.split()[1]) == status, (line, content)
        return content

    def json(
        self, model: str, status: int = 200, document: Mapping[str, Any] | None = None, **headers: object
    ) -> bytes:
        body = json.dumps({"inputs": [tensor()]} if document is None else document).encode()
        return self.post(f"/v2/models/{model}/infer", body, status, **headers)

    def binary(self, model: str, values: Any = (1, 2, 3, 4), status: int = 200, **headers: object) -> bytes:
        raw = np.array(values, np.float32).tobytes()
        document = {
            "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, len(raw) // 4],
                        "parameters": {"binary_data_size": len(raw)}}],
            "parameters": {"binary_data_output": True},
        }  # fmt: skip
        front = json.dumps(document).encode()
        headers["Inference-Header-Content-Length"] = len(front)
        return self.post(f"/v2/models/{model}/infer", front + raw, status, **headers)

    def message(self, model: str, **fields: Any) -> service_pb2.ModelInferRequest:
        request = service_pb2.ModelInferRequest(model_name=model, **fields)
        request.inputs.add(name="IN", datatype="FP32", shape=[1, 4])
        request.raw_input_contents.append(np.arange(4, dtype=np.float32).tobytes())
        return request

    def method(self, name: str, kind: str = "unary_unary", answer: Any = service_pb2.ModelInferResponse) -> Any:
        return getattr(self.channel, kind)(
            f"/inference.GRPCInferenceService/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )

    def unary(self, model: str, code: grpc.StatusCode = grpc.StatusCode.OK, timeout_s: float = 90) -> None:
        outcome = self.method("ModelInfer").future(self.message(model), timeout=timeout_s)
        assert outcome.code() is code

    def stream(self, model: str, count: int = 1) -> None:
        """A stream of its own with one request, and ``count`` answers."""
        ask = self.method("ModelStreamInfer", "stream_stream", service_pb2.ModelStreamInferResponse)
        assert len(list(ask(iter([self.message(model)]), timeout=90))) == count


Call = Callable[[Caller], object]


def leave_http(caller: Caller) -> None:
    body = json.dumps({"inputs": [tensor()]}).encode()
    with caller.connect() as connection:
        connection.sendall(caller.head("/v2/models/waits/infer", len(body), {}) + body)


def leave_grpc(caller: Caller) -> None:
    call = caller.method("ModelInfer").future(caller.message("waits"), timeout=90)
    # Beneath one connection this answer is behind the request.
    caller.method("ModelReady", answer=service_pb2.ModelReadyResponse)(service_pb2.ModelReadyRequest(name="waits"))
    call.cancel()


def leave_stream(*models: str) -> Call:
    """Infer each of ``models`` on one stream, and close it after the first answer."""

    def ask(caller: Caller) -> None:
        method = caller.method("ModelStreamInfer", "stream_stream", service_pb2.ModelStreamInferResponse)
        call = method(iter([caller.message(model) for model in models]), timeout=90)
        next(iter(call))
        call.cancel()

    return ask


def connect_anew(caller: Caller) -> None:
    caller.connection.close()
    caller.connection = caller.connect()
    caller.binary("plain")


def sequence(model: str) -> Call:
    def ask(caller: Caller) -> None:
        caller.number += 1
        for start, end in ((True, False), (False, True)):
            parameters = {"sequence_id": caller.number, "sequence_start": start, "sequence_end": end}
            caller.json(model, document={"inputs": [tensor()], "parameters": parameters})

    return ask


def varied(caller: Caller) -> None:
    caller.number += 1
    document = {"id": str(caller.number), "inputs": [tensor((caller.number, 1))]}
    caller.json("plain", document=document, X_Request_Id=caller.number)


def strings(caller: Caller) -> None:
    data = {**tensor(), "datatype": "BYTES", "data": ["a", "bc", "", "d"]}
    caller.json("strings", document={"inputs": [data]})


def compressed(caller: Caller) -> None:
    body = gzip.compress(json.dumps({"inputs": [tensor()]}).encode())
    caller.post("/v2/models/plain/infer", body, Content_Encoding="gzip", Accept_Encoding="deflate")


def cached(caller: Caller) -> None:
    caller.number += 1
    for _ in range(2):
        caller.binary("cached", (caller.number, 1))


def events(caller: Caller, leaves: bool = False) -> None:
    body = json.dumps({"inputs": [tensor()]}).encode()
    head = caller.head("/v2/models/streams_thread/events", len(body), {"Connection": "close"})
    with caller.connect() as connection, connection.makefile("rb") as stream:
        connection.sendall(head + body)
        assert b" 200 " in stream.readline()
        if not leaves:
            assert stream.read().count(b"data: ") == 2


def get(path: str, method: bytes = b"GET") -> Call:
    def ask(caller: Caller) -> None:
        caller.connection.sendall(method + f" {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        with caller.connection.makefile("rb") as stream:
            assert b" 200 " in stream.readline()
            size = 0
            while (header := stream.readline()) != b"\r\n":
                if header.lower().startswith(b"content-length:"):
                    size = int(header.split(b":")[1])
            stream.read(size)

    return ask


LARGE = np.ones(50_000, np.float32)
LARGE_JSON = {"inputs": [tensor(value / 7 for value in range(5_000))]}
EXPIRED = grpc.StatusCode.UNAVAILABLE
KINDS: dict[str, Call] = {
    "http-binary": lambda caller: caller.binary("plain"),
    "http-binary-on-the-loop": lambda caller: caller.binary("loop"),
    "http-large-binary": lambda caller: caller.binary("plain", LARGE),
    "http-large-json": lambda caller: caller.json("plain", document=LARGE_JSON),
    "http-json": lambda caller: caller.json("plain"),
    "http-json-varied": varied,
    "http-strings": strings,
    "http-compressed": compressed,
    "http-cached": cached,
    "http-ensemble": lambda caller: caller.binary("ensemble"),
    "http-sequence-direct": sequence("direct"),
    "http-sequence-oldest": sequence("oldest"),
    "http-new-connection": connect_anew,
    "http-left": leave_http,
    "http-expired": lambda caller: caller.json("expires", 503),
    "http-unknown-model": lambda caller: caller.json("nobody", 404),
    "http-unknown-path": lambda caller: caller.post("/v2/nothing", status=404),
    "http-no-json": lambda caller: caller.post("/v2/models/plain/infer", b"{", 500),
    "http-wrong-shape": lambda caller: caller.json("plain", 500, {"inputs": [{**tensor(), "shape": [9, 9]}]}),
    "http-wrong-name": lambda caller: caller.json("plain", 400, {"inputs": [{**tensor(), "name": "NO"}]}),
    "http-no-gzip": lambda caller: caller.post("/v2/models/plain/infer", b"{", 400, Content_Encoding="gzip"),
    "http-shared-memory": lambda caller: caller.json(
        "plain", 400, {"inputs": [tensor(shared_memory_region="r", shared_memory_byte_size=16)]}
    ),
    "http-decoupled": lambda caller: caller.json("streams_thread", 501),
    "http-ready": get("/v2/health/ready"),
    "http-metadata": get("/v2/models/plain"),
    "http-config": get("/v2/models/plain/config"),
    "http-statistics": get("/v2/models/plain/stats"),
    "http-index": get("/v2/repository/index", b"POST"),
    "http-events": events,
    "http-events-left": lambda caller: events(caller, leaves=True),
    "infer": lambda caller: caller.post("/garbage/infer"),
    "infer-async": lambda caller: caller.post("/garbage/infer_async"),
    "infer-refused": lambda caller: caller.post("/garbage/refused", status=404),
    "grpc-unary": lambda caller: caller.unary("plain"),
    "grpc-unary-on-the-loop": lambda caller: caller.unary("loop"),
    "grpc-unknown-model": lambda caller: caller.unary("nobody", grpc.StatusCode.NOT_FOUND),
    "grpc-decoupled": lambda caller: caller.unary("streams_thread", grpc.StatusCode.UNIMPLEMENTED),
    "grpc-expired": lambda caller: caller.unary("expires", EXPIRED),
    "grpc-deadline": lambda caller: caller.unary("waits", grpc.StatusCode.DEADLINE_EXCEEDED, 0.01),
    "grpc-left": leave_grpc,
    "grpc-stream": lambda caller: caller.stream("plain"),
    "grpc-stream-unknown-model": lambda caller: caller.stream("nobody"),
    "grpc-stream-left": leave_stream("plain", "waits"),
}
for where in ("thread", "process"):
    KINDS |= {
        f"python-echoes-{where}": lambda caller, where=where: caller.binary(f"echoes_{where}"),  # type: ignore[misc]
        f"python-raises-{where}": lambda caller, where=where: caller.json(f"raises_{where}", 500),  # type: ignore[misc]
        f"python-fails-{where}": lambda caller, where=where: caller.json(f"fails_{where}", 500),  # type: ignore[misc]
        f"python-asks-{where}": lambda caller, where=where: caller.binary(f"asks_{where}"),  # type: ignore[misc]
        f"python-streams-{where}": lambda caller, where=where: caller.stream(f"streams_{where}", 2),  # type: ignore[misc]
        f"python-streams-left-{where}": leave_stream(f"streams_{where}"),
    }


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        if (module := MODULES.get(name.rpartition("_")[0])) is not None:
            (repository / name / "1" / "model.py").write_text(MODULE + module)
    return repository


@pytest.fixture(scope="module")
def server(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Headrace]
) -> Headrace:
    site = tmp_path_factory.mktemp("site")
    (site / "headrace_garbage.py").write_text(PLUGIN)
    info = site / "headrace_garbage-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-garbage\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace]\ngarbage = headrace_garbage\n")
    environ = {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    words = (f"--model-repository={repository}", "--cache-config=local,size=10000000")
    return keep_serving(*words, environ=environ)


@pytest.fixture(scope="module")
def caller(server: Headrace) -> Iterator[Caller]:
    caller = Caller(server)
    yield caller
    caller.close()


def test_the_garbage_collector_finds_deliberate_cycles(server: Headrace, caller: Caller) -> None:
    caller.post("/garbage/begin")
    for _ in range(REQUESTS):
        caller.json("cycles_thread")
    count, circle = json.loads(caller.post("/garbage/count"))
    assert count["builtins.list"] >= REQUESTS
    assert circle


@pytest.mark.parametrize("kind", KINDS)
def test_requests_leave_no_reference_cycles(kind: str, server: Headrace, caller: Caller, repository: Path) -> None:
    ask = KINDS[kind]
    child = repository / f"{kind.split('-')[1]}_process" / "1" if kind.endswith("-process") else None
    if child:
        (child / "begin").touch()
    for _ in range(3):  # objects that are created once
        ask(caller)
    server.wait_until_pending("waits", 0)
    caller.post("/garbage/begin")
    for _ in range(REQUESTS):
        ask(caller)
    server.wait_until_pending("waits", 0)
    count, circle = json.loads(caller.post("/garbage/count"))
    assert sum(count.values()) < REQUESTS // 2, json.dumps([Counter(count).most_common(20), circle], indent=1)
    if child:
        (child / "count").touch()
        ask(caller)
        assert int((child / "found").read_text()) < REQUESTS // 2
