"""Admission in a real server, over real sockets with the stock clients: every operation of every protocol."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import grpc
import httpx
import numpy as np
import pytest
from tritonclient import grpc as grpc_client
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from headrace import (
    AnyOperation,
    Caller,
    Code,
    Extension,
    ExtensionOperation,
    FinishedInference,
    GrpcMethod,
    HeadraceError,
    HttpCall,
    HttpReply,
    HttpRoute,
    InferRequest,
    Interceptor,
    InternalError,
    InvalidArgument,
    Meter,
    ModelView,
    Operation,
    Outcome,
    PermissionDenied,
    PublishedMetric,
    ResourceExhausted,
    Ticket,
    Unauthenticated,
    Unavailable,
    Watch,
    hookimpl,
)
from headrace.engine import Engine, admitted_caller
from headrace.models.submission import check_and_enqueue
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace.server import Server
from headrace_grpc.rpc_table import rpcs as rpc_table
from headrace_http.message import HttpRequest
from headrace_http.routes import Routes

CONFIG = """
backend: "identity"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


class Door(Interceptor):
    """Refuses every caller, with the error of the test."""

    name = "door"
    error: ClassVar[HeadraceError]
    seen: ClassVar[list[tuple[str, str, str]]]

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        self.seen.append((caller.transport, str(operation), model))
        raise self.error


class Listener(Interceptor):
    """Takes no operation, and is notified of refused ones."""

    name = "listener"
    refusals: ClassVar[list[tuple[str, HeadraceError]]] = []

    def samples(self, operation: AnyOperation, model: Callable[[], str], traceparent: str) -> bool:
        return False

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        raise AssertionError(f"it is asked about '{operation}'")

    def refused(self, caller: Caller, error: HeadraceError) -> None:
        assert not caller.is_over
        self.refusals.append((str(caller.operation), error))


class Own(HttpRoute):
    """A route of a plugin, whose operation is its own."""

    name = "GET /v2/own/{name}"
    operation = ExtensionOperation("own")

    async def answer(self, call: HttpCall) -> HttpReply:
        return HttpReply(200)


class OwnMethod(GrpcMethod):
    """A method of a plugin, whose operation is its own."""

    name = "/own.Service/Ask"
    operation = ExtensionOperation("own_method", "metadata")

    async def answer(self, request: bytes, caller: Caller) -> bytes:
        return request


class OwnExtension(Extension):
    name = "own"
    adds = (Own, OwnMethod)


class Ports(SimpleNamespace):
    """A running server, and the ports it listens on."""

    server: Server
    http: int
    grpc: int
    metrics: int


Serve = Callable[..., None]


@pytest.fixture
def hosts() -> tuple[str, str]:
    """The hosts of HTTP and gRPC. Plugins' tests have their own."""
    return "native", "native"


@pytest.fixture
def serve(
    hosts: tuple[str, str], write_model: Any, make_server: Callable[..., Server], use: Callable[..., None]
) -> Serve:
    """Runs a scenario on a thread, against a server with its ports and with the interceptors of the test."""
    http_server, grpc_server = hosts

    def run(scenario: Callable[[Ports], Any], *interceptors: type[Interceptor], **options: Any) -> None:
        write_model("m", CONFIG)
        use(*interceptors)

        async def main() -> None:
            addresses = {f"{name}_address": "127.0.0.1" for name in ("http", "grpc", "metrics")}
            ports = {f"{name}_port": 0 for name in ("http", "grpc", "metrics")}
            how = {"http_server": http_server, "grpc_server": grpc_server, "exit_timeout_secs": 5}
            server = make_server(**addresses, **ports, **how, **options)
            async with server:
                await server.start_frontends()
                found = {each.protocol or each.name: each.port for each in server.frontends}  # type: ignore[attr-defined]
                await asyncio.to_thread(scenario, Ports(server=server, **found))

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds a plugin with these interceptors, and the route, to every server that is made."""

    def install(*interceptors: type[Interceptor]) -> None:
        discover = Plugins.discover
        plugin = ModuleType("test")
        plugin.register_interceptors = hookimpl(lambda: list(interceptors))  # type: ignore[attr-defined]
        plugin.register_extensions = hookimpl(lambda: [OwnExtension])  # type: ignore[attr-defined]

        def more(allow: Any = None) -> Plugins:
            from headrace.registry import PluginInfo

            plugins = discover(allow)
            plugins._add(PluginInfo("test", "test", "0"), lambda: plugin)
            return plugins

        monkeypatch.setattr(Plugins, "discover", more)

    return install


# ---------------------------------------------------------------------- every operation is refused with the right code

#: Method and path of every operation over HTTP.
PATHS = {
    "live": ("GET", "/v2/health/live"),
    "ready": ("GET", "/v2/health/ready"),
    "model_ready": ("GET", "/v2/models/m/ready"),
    "server_metadata": ("GET", "/v2"),
    "model_metadata": ("GET", "/v2/models/m"),
    "model_config": ("GET", "/v2/models/m/config"),
    "statistics": ("GET", "/v2/models/stats"),
    "explain": ("GET", "/v2/models/m/explain"),
    "infer": ("POST", "/v2/models/m/infer"),
    "generate": ("POST", "/v2/models/m/generate"),
    "index": ("POST", "/v2/repository/index"),
    "load": ("POST", "/v2/repository/models/m/load"),
    "unload": ("POST", "/v2/repository/models/m/unload"),
    "trace_settings": ("GET", "/v2/trace/setting"),
    "log_settings": ("GET", "/v2/logging"),
    "shared_memory_status": ("GET", "/v2/systemsharedmemory/status"),
    "shared_memory_register": ("POST", "/v2/systemsharedmemory/region/r/register"),
    "shared_memory_unregister": ("POST", "/v2/cudasharedmemory/unregister"),
    "own": ("GET", "/v2/own/m"),
}
#: Further paths of operations above.
OTHER_PATHS = {
    *("/v2/models/m/stats", "/v2/systemsharedmemory/unregister", "/v2/cudasharedmemory/status"),
    *("/v2/cudasharedmemory/register", "/v2/models/m/events", "/v2/models/m/versions/1/events"),
    *("/v2/models/m/generate_stream", "/openapi.json", "/openapi/models/m/example.json", "/v2/models/m/traffic"),
    *("/dashboard", "/dashboard/models.json", "/dashboard/log.json"),
    *(f"/dashboard/{file}" for file in ("dashboard.css", "dashboard.js", "request_form.js")),
    *(f"/dashboard/chat{file}" for file in ("", ".css", ".js")),
    *(f"/v1/{path}" for path in ("models", "models/m", "chat/completions", "completions", "responses", "embeddings")),
    *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/audio/transcriptions", "/health", "/health/ready"),
}
REFUSALS = [
    (Unauthenticated("who are you?", challenge="Bearer"), 401, "UNAUTHENTICATED", {"www-authenticate": "Bearer"}),
    (PermissionDenied("you may not"), 403, "PERMISSION_DENIED", {}),
    (ResourceExhausted("not so fast", retry_after_s=1.5), 429, "RESOURCE_EXHAUSTED", {"retry-after": "2"}),
]


@pytest.mark.parametrize(("error", "status", "code", "headers"), REFUSALS, ids=["401", "403", "429"])
def test_one_interceptor_refuses_every_operation_of_every_protocol(
    serve: Serve, error: HeadraceError, status: int, code: str, headers: Mapping[str, str]
) -> None:
    Door.error, Door.seen = error, []

    def scenario(ports: Ports) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{ports.http}") as client:
            for operation, (method, path) in PATHS.items():
                # A body that is no request, and a method that is none, are not judged before the caller.
                for verb in (method, "DELETE"):
                    reply = client.request(verb, path, content=b"\xff{")
                    assert (reply.status_code, reply.json()) == (status, {"error": error.message}), (verb, path)
                    assert headers.items() <= reply.headers.items()
                    assert Door.seen.pop()[:2] == ("http", operation)
                    assert Listener.refusals.pop() == (operation, error)
        reply = httpx.get(f"http://127.0.0.1:{ports.metrics}/metrics")
        assert (reply.status_code, reply.json()) == (status, {"error": error.message})
        assert Door.seen.pop() == ("metrics", "metrics", "")
        with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            for service, method in rpcs(ports.server.engine):
                path = f"/{service}/{method.name}"
                # A message that does not parse is not judged before the caller.
                if method.stream is None:
                    call: Any = channel.unary_unary(path, bytes, bytes).future(b"\xff\xff", timeout=30)
                else:
                    call = channel.stream_stream(path, bytes, bytes)(iter([b"\xff\xff"]), timeout=30)
                assert (call.code().name, call.details()) == (code, error.message), path
                assert Door.seen.pop()[:2] == ("grpc", str(method.operation))
                assert Listener.refusals.pop() == (str(method.operation), error)
        with pytest.raises(type(error), match=error.message):
            ports.server.infer("m", {"x": np.zeros((1, 2), np.float32)})
        assert Door.seen.pop() == ("program", "infer", "m")
        assert ports.server.resolve("m").snapshot().success.count == 0

    Listener.refusals.clear()
    serve(scenario, Door, Listener, model_control_mode="explicit", load_model=["m"])
    assert Door.seen == []


def rpcs(engine: Engine) -> list[tuple[str, Any]]:
    from headrace_grpc.rpc_table import rpcs as table

    return [(rpc.service, rpc) for rpc in table(engine)]


def test_the_paths_above_are_all_that_the_server_has(write_model: Any, make_server: Callable[..., Server]) -> None:
    """A route or an RPC without an operation can not be made; one that is not tested above fails here."""
    from headrace_http.routes import Routes

    engine = make_server().engine
    paths = {path for _, path in PATHS.values()} | OTHER_PATHS
    table = Routes(engine).table
    for route in table:
        assert isinstance(route.operation, Operation | ExtensionOperation), route
        assert any(route.pattern.fullmatch(path) for path in paths), f"{route.pattern.pattern} is not asked above"
    operations = {route.operation for route in table} | {rpc.operation for _, rpc in rpcs(engine)}
    assert all(isinstance(operation, Operation | ExtensionOperation) for operation in operations)
    assert {each for each in operations if isinstance(each, Operation)} == set(Operation) - {Operation.METRICS}


@pytest.mark.parametrize("operation", Operation)
def test_every_operation_has_a_category(operation: Operation) -> None:
    known = ("", "health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics")
    assert operation.category in (*known, "trace", "logging")


# ---------------------------------------------------------------------- what an interceptor may do


class Guide(Interceptor):
    """Names the principal, and refuses one of them."""

    name = "guide"

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        caller.principal = caller.header("x-user") or caller.principal
        if caller.principal == "mallory":
            raise PermissionDenied(f"{caller.principal} may not {operation} {model}")


class Seen(Interceptor):
    """Notes what passes, the answers, and the ends."""

    name = "seen"
    calls: ClassVar[list[tuple[str, str, str, str, str]]] = []
    answers: ClassVar[list[tuple[str, bool]]] = []
    ends: ClassVar[list[Outcome]] = []

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch:
        self.calls.append((caller.transport, caller.peer, caller.principal, str(operation), model))
        return _Notes()


class _Notes(Watch):
    def answered(self, answer: Any, final: bool) -> None:
        Seen.answers.append((type(answer).__name__, final))

    def ended(self, outcome: Outcome) -> None:
        Seen.ends.append(outcome)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    for noted in (Seen.calls, Seen.answers, Seen.ends, Waits.begun):
        noted.clear()


def post(port: int, size: int = 2, user: str = "", **headers: str) -> httpx.Response:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, size], "data": [0.5] * size}
    sent = {"X-User": user, **headers}
    return httpx.post(f"http://127.0.0.1:{port}/v2/models/m/infer", json={"inputs": [tensor]}, headers=sent)


def call(port: int, user: str, size: int = 2) -> Any:
    with grpc_client.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer("m", [tensor_of(size)], headers={"x-user": user})


def tensor_of(size: int = 2) -> Any:
    tensor = grpc_client.InferInput("x", [1, size], "FP32")
    tensor.set_data_from_numpy(np.full((1, size), 0.5, np.float32))
    return tensor


def test_interceptors_see_requests_answers_and_ends_of_every_protocol(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        assert post(ports.http, user="alice").status_code == 200
        call(ports.grpc, "bob")
        ports.server.infer("m", {"x": np.zeros((1, 2), np.float32)})

    serve(scenario, Guide, Seen)
    assert Seen.calls == [
        ("http", "127.0.0.1", "alice", "infer", "m"),
        ("grpc", "127.0.0.1", "bob", "infer", "m"),
        ("program", "", "", "infer", "m"),
    ]
    assert Seen.answers == [("InferResponse", True)] * 3
    assert [outcome.error for outcome in Seen.ends] == [None] * 3
    assert all(outcome.begun_ns < outcome.ended_ns for outcome in Seen.ends)


@pytest.mark.parametrize("size", [50_000], ids=["large"])
def test_a_request_that_a_thread_reads_is_seen_too(serve: Serve, size: int) -> None:
    def scenario(ports: Ports) -> None:
        assert post(ports.http, size, "alice").status_code == 200
        call(ports.grpc, "bob", size)
        assert typed(ports.grpc, size) == size

    serve(scenario, Guide, Seen)
    assert [seen[2:] for seen in Seen.calls] == [("alice", "infer", "m"), ("bob", "infer", "m"), ("eve", "infer", "m")]
    assert Seen.answers == [("InferResponse", True)] * 3
    assert [outcome.error for outcome in Seen.ends] == [None] * 3


def typed(port: int, size: int) -> int:
    """Send a message whose contents protobuf lists, which is left to a thread."""
    request = service_pb2.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, size])
    tensor.contents.fp32_contents.extend([0.5] * size)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return int(stub.ModelInfer(request, metadata=[("x-user", "eve")], timeout=60).outputs[0].shape[1])


def test_a_request_refused_behind_an_interceptor_is_its_answer_and_its_end(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        wrong = {"inputs": [{"name": "z", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
        assert httpx.post(f"http://127.0.0.1:{ports.http}/v2/models/m/infer", json=wrong).status_code == 400
        assert httpx.post(f"http://127.0.0.1:{ports.http}/v2/models/m/infer", content=b"{").status_code == 500
        assert httpx.get(f"http://127.0.0.1:{ports.http}/v2/models/nope/config").status_code == 404
        with pytest.raises(InferenceServerException):
            grpc_client.InferenceServerClient(f"127.0.0.1:{ports.grpc}").get_model_config("nope")

    serve(scenario, Seen)
    assert Seen.answers == [("InvalidArgument", True)]  # the others are no inferences that a model has refused
    assert [outcome.error is None for outcome in Seen.ends] == [False] * 4


class Sizes(Interceptor):
    """Notes the size of each message and each end, with a watch that does not see answers."""

    name: ClassVar[str] = "sizes"

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch:
        Seen.calls.append((caller.transport, str(operation), str(caller.body_bytes), "", ""))
        return _Ends()


class _Ends(Watch):
    def ended(self, outcome: Outcome) -> None:
        Seen.ends.append(outcome)


@pytest.mark.parametrize("size", [2, 50_000], ids=["small", "large"])
def test_the_size_of_a_message_is_known_and_each_operation_ends_once(serve: Serve, size: int) -> None:
    content = np.full(size, 0.5, np.float32).tobytes()
    request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[content])
    request.inputs.add(name="x", datatype="FP32", shape=[1, size])

    def scenario(ports: Ports) -> None:
        answered = post(ports.http, size)
        assert answered.status_code == 200
        body = len(answered.request.content)
        with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.ModelInfer(request, timeout=60)
            assert len(list(stub.ModelStreamInfer(iter([request, request]), timeout=60))) == 2
        ports.server.infer("m", {"x": np.zeros((1, 2), np.float32)})
        assert [seen[:3] for seen in Seen.calls] == [
            ("http", "infer", str(body)),
            ("grpc", "infer", str(request.ByteSize())),
            ("grpc", "open_stream", "0"),
            ("grpc", "infer", str(request.ByteSize())),
            ("grpc", "infer", str(request.ByteSize())),
            ("program", "infer", "0"),
        ]

    serve(scenario, Sizes)
    assert [outcome.error for outcome in Seen.ends] == [None] * 6


class Publishes(Seen):
    """An interceptor with a metric."""

    name = "publishes"
    metrics = (PublishedMetric("headrace_publishes_asked", "Number of operations", label="kind"),)

    def measure(self) -> dict[str, Any]:
        return {"headrace_publishes_asked": {"all": len(self.calls)}}

    def publishers(self) -> Any:
        yield {"of": "seen"}, self


def test_an_interceptor_may_have_metrics(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        ports.server.infer("m", {"x": np.zeros((1, 2), np.float32)})
        [metric] = [each for each in ports.server.engine.collect() if each.name == "headrace_publishes_asked"]
        assert [(each.labels, each.value) for each in metric.samples] == [({"of": "seen", "kind": "all"}, 1)]

    serve(scenario, Publishes)


class Order(Interceptor):
    """Records its calls and each answer and end that it sees, and refuses a caller that names it."""

    name: ClassVar[str] = "order"
    events: ClassVar[list[str]] = []

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch:
        self.events.append(f"{self.name} is asked")
        if Refusing.name == self.name:
            raise Unavailable(f"{self.name} refuses")
        return _Noted(self.name)

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> None:
        self.events.append(f"{self.name} reads")


class Refusing:
    name = ""


class _Noted(Watch):
    def __init__(self, name: str) -> None:
        self.name = name

    def answered(self, answer: Any, final: bool) -> None:
        Order.events.append(f"{self.name} sees {type(answer).__name__}")

    def ended(self, outcome: Outcome) -> None:
        Order.events.append(f"{self.name} ends with {type(outcome.error).__name__}")


class First(Order):
    name = "first"


class Second(Order):
    name = "second"


class Third(Order):
    name = "third"


@pytest.mark.parametrize("order", [(First, Second, Third), (Third, First, Second), (Second, Third, First)])
def test_interceptors_are_asked_in_order_and_see_answers_the_other_way_round(
    write_model: Any, make_server: Callable[..., Server], use: Any, order: tuple[type[Interceptor], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use(*order)
    write_model("m", CONFIG)
    outer, middle, _ = names = [kind.name for kind in order]
    admissions = [f"{name} is asked" for name in names]
    read = [f"{name} reads" for name in names]
    back = [*reversed(names)]

    async def scenario() -> None:
        async with make_server() as server:
            Order.events.clear()
            await server.infer_async("m", {"x": np.zeros((1, 2), np.float32)})
            answered = [f"{name} sees InferResponse" for name in back]
            assert Order.events == [*admissions, *read, *answered, *(f"{name} ends with NoneType" for name in back)]
            Order.events.clear()
            with pytest.raises(InvalidArgument):  # behind all of them
                await server.infer_async("m", {"x": np.zeros((9, 2), np.float32)})
            answered = [f"{name} sees InvalidArgument" for name in back]
            assert Order.events == [
                *admissions,
                *read,
                *answered,
                *(f"{name} ends with InvalidArgument" for name in back),
            ]
            Order.events.clear()
            monkeypatch.setattr(Refusing, "name", middle)
            with pytest.raises(Unavailable, match=f"{middle} refuses"):
                await server.infer_async("m", {"x": np.zeros((1, 2), np.float32)})
            assert Order.events == [*admissions[:2], f"{outer} ends with Unavailable"]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_plugins_are_asked_in_the_order_in_which_they_are_found(
    write_model: Any, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entry points are sorted by name: core's own are first, then ``a`` and ``b``, in any order of installation."""
    from headrace import plugins as module

    class Point:
        def __init__(self, name: str, kind: type[Interceptor]) -> None:
            self.name, self._kind = name, kind

        def load(self) -> ModuleType:
            plugin = ModuleType(self.name)
            plugin.register_interceptors = hookimpl(lambda: [self._kind])  # type: ignore[attr-defined]
            return plugin

    points = [Point("b", First), Point("a", Second)]
    monkeypatch.setattr(module, "_installed", lambda: [(PluginInfo(each.name, "tests", "0"), each) for each in points])
    assert [kind.name for kind in Plugins.discover().interceptors][-2:] == ["second", "first"]


# ---------------------------------------------------------------------- waiting


class Waits(Interceptor):
    """Waits for the test, and then refuses or lets pass."""

    name = "waits"
    begun: ClassVar[list[str]] = []
    has_begun: ClassVar[threading.Event]
    go_on: ClassVar[threading.Event]

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Awaitable[Watch | None]:
        return self._admit(caller, str(operation))

    async def _admit(self, caller: Caller, operation: str) -> Watch:
        self.begun.append(operation)
        Waits.has_begun.set()
        while not Waits.go_on.is_set():
            await asyncio.sleep(0.01)
        if caller.header("x-user") == "mallory":
            raise ResourceExhausted("the quota is used up", retry_after_s=7)
        return _Notes()


@pytest.fixture
def held() -> threading.Event:
    Waits.has_begun, Waits.go_on = threading.Event(), threading.Event()
    return Waits.go_on


def test_an_interceptor_may_wait_and_then_let_pass_or_refuse(serve: Serve, held: threading.Event) -> None:
    def scenario(ports: Ports) -> None:
        held.set()
        assert post(ports.http).status_code == 200
        reply = post(ports.http, user="mallory")
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
        assert httpx.get(f"http://127.0.0.1:{ports.http}/v2/models/m/config").status_code == 200
        assert httpx.get(f"http://127.0.0.1:{ports.metrics}/metrics").status_code == 200
        call(ports.grpc, "alice")
        with pytest.raises(InferenceServerException, match="quota") as refused:
            call(ports.grpc, "mallory")
        assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        ports.server.infer("m", {"x": np.zeros((1, 2), np.float32)})
        with grpc_client.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
            assert client.get_model_config("m").config.name == "m"
            assert streamed(client, "m") == ["m"]

    serve(scenario, Seen, Waits, Guide)
    kinds = ["infer", "infer", "model_config", "metrics", "infer", "infer", "infer", "model_config", "open_stream"]
    assert Waits.begun == [*kinds, "infer"]
    assert len(Seen.ends) == 2 * 10 - 2


def streamed(client: Any, *models: str, **headers: str) -> list[str]:
    """Infer ``models`` on one stream; return the names of those that answered, and the texts of errors."""
    outcomes: list[str] = []
    done = threading.Event()

    def receive(result: Any, error: Any) -> None:
        outcomes.append(error.message() if error is not None else result.get_response().model_name)
        if len(outcomes) == len(models):
            done.set()

    client.start_stream(receive, headers=headers)
    for model in models:
        client.async_stream_infer(model, [tensor_of()])
    assert done.wait(60)
    client.stop_stream()
    return outcomes


def test_a_request_cancelled_while_an_interceptor_waits_is_not_answered(serve: Serve, held: threading.Event) -> None:
    def scenario(ports: Ports) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            call = stub.ModelInfer.future(service_pb2.ModelInferRequest(model_name="m"))
            assert Waits.has_begun.wait(60)
            call.cancel()
            deadline = threading.Event()
            while not Seen.ends and not deadline.wait(0.01):
                pass
        held.set()
        assert ports.server.resolve("m").snapshot().success.count == 0

    serve(scenario, Seen, Waits)
    assert [type(outcome.error).__name__ for outcome in Seen.ends] == ["Cancelled"]


def test_a_request_cancelled_before_its_task_has_started_ends(serve: Serve, held: threading.Event) -> None:
    """In the turn of the event loop in which it arrived."""
    answers: list[Any] = []

    def scenario(ports: Ports) -> None:
        engine = ports.server.engine

        async def over_grpc() -> None:
            context: Any = SimpleNamespace(metadata=(), deadline_ns=0, peer="", certificate=None, has_left=True)
            [rpc] = [each for each in rpc_table(engine) if each.name == "ModelInfer"]
            body = service_pb2.ModelInferRequest(model_name="m").SerializeToString()
            assert rpc.direct is not None
            cancel = rpc.direct(body, context, answers.append)
            assert cancel is not None
            cancel()

        async def over_http() -> None:
            request = HttpRequest("POST", "/v2/models/m/infer", {}, memoryview(b"{}"))
            cancel = Routes(engine).dispatch(request, answers.append)
            assert cancel is not None
            cancel()

        async def in_the_program() -> None:
            request = InferRequest("m", {"x": np.zeros((1, 2), np.float32)})
            ticket = Ticket(request, lambda answer, final: answers.append(answer))
            engine.submitter().submit(ticket, Caller("program"))
            ticket.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        for number, ask in enumerate((over_grpc, over_http, in_the_program), 1):
            asyncio.run_coroutine_threadsafe(ask(), ports.server.loop).result(60)
            deadline = threading.Event()
            while len(Seen.ends) < number and not deadline.wait(0.01):
                pass
        assert [type(outcome.error).__name__ for outcome in Seen.ends] == ["Cancelled"] * 3

    serve(scenario, Seen, Waits)
    assert [type(answer).__name__ for answer in answers] == ["Cancelled"]  # a client that has left gets none


# ---------------------------------------------------------------------- what a server without interceptors does


def test_without_interceptors_a_request_is_started_by_nothing_else(make_server: Callable[..., Server]) -> None:
    from headrace_http.routes import Routes

    engine: Engine = make_server().engine
    assert engine.admission is None
    assert engine.submitter().start is check_and_enqueue
    routes = Routes(engine)
    assert routes.dispatch == routes._dispatch
    with pytest.raises(Unavailable):
        engine.submitter().find("m", "")


def test_a_request_that_its_frontend_has_not_admitted_is_refused(
    write_model: Any, make_server: Callable[..., Server], use: Callable[..., None]
) -> None:
    write_model("m", CONFIG)
    use(Tenant)

    async def main() -> None:
        async with make_server() as server:
            submitter = server.engine.submitter(describe=admitted_caller)
            request = InferRequest("m", {"x": np.zeros((1, 2), np.float32)})
            with pytest.raises(InternalError, match="the request to model 'm' has passed no interceptor"):
                submitter.start(submitter.find("m", ""), Ticket(request, lambda *answer: None), object())

    asyncio.run(asyncio.wait_for(main(), 60))


# ---------------------------------------------------------------------- replacing, streams, and inferences of routes


class Tenant(Interceptor):
    """Halves the input if the caller's header requests it, and passes on the caller."""

    name = "tenant"
    senders: ClassVar[list[Caller | None]] = []

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        if model == "secret":
            raise PermissionDenied("'secret' is not for you")

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        self.senders.append(request.sender)
        half = {name: np.asarray(value) / 2 for name, value in request.inputs.items()}
        return request.with_inputs(half) if caller.header("x-user") == "half" else None


def test_an_interceptor_may_replace_a_request(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        assert post(ports.http).json()["outputs"][0]["data"] == [0.5, 0.5]
        assert post(ports.http, user="half").json()["outputs"][0]["data"] == [0.25, 0.25]
        assert call(ports.grpc, "half").as_numpy("y").tolist() == [[0.25, 0.25]]

    serve(scenario, Tenant)
    Tenant.senders.clear()


def test_a_refusal_on_a_stream_is_an_error_of_its_message_and_the_stream_continues(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        with grpc_client.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
            assert streamed(client, "m", "secret", "m") == ["m", "'secret' is not for you", "m"]

    serve(scenario, Tenant)
    Tenant.senders.clear()


def test_a_message_that_names_another_model_than_was_admitted_is_refused(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        twice = service_pb2.ModelConfigRequest(name="m").SerializeToString()
        twice += service_pb2.ModelConfigRequest(name="secret").SerializeToString()  # protobuf takes the last one
        with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelConfig", bytes, bytes).future(twice)
            assert (call.code().name, call.details()[:44]) == (
                "INVALID_ARGUMENT",
                "the message names its model 'secret' behind ",
            )

    serve(scenario, Tenant)


class Fails(Interceptor):
    name = "fails"

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        raise ZeroDivisionError("a mistake")


def test_an_interceptor_that_fails_refuses_everything(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def scenario(ports: Ports) -> None:
        reply = post(ports.http)
        assert (reply.status_code, "a mistake" in reply.text) == (500, False)
        with pytest.raises(InferenceServerException, match="its log has the reason"):
            call(ports.grpc, "alice")

    serve(scenario, Fails)
    assert "an interceptor raised an exception at the operation 'infer'" in caplog.text


# ---------------------------------------------------------------------- an interceptor that takes some requests only


class Sampling(Interceptor):
    """Takes every other inference, and each with a trace context."""

    name = "sampling"
    follows_trace_context = True
    traceparents: ClassVar[list[str]] = []
    taken: ClassVar[list[str]] = []
    sent: ClassVar[list[str]] = []

    def samples(self, operation: AnyOperation, model: Callable[[], str], traceparent: str) -> bool:
        if operation is not Operation.INFER:
            return False
        self.traceparents.append(model())
        return len(self.traceparents) % 2 == 0 or bool(traceparent)

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch:
        self.taken.append(f"{caller.transport} {operation} {model}")
        caller.on_sent = lambda: self.sent.append(caller.transport)
        return _Notes()


@pytest.fixture
def no_samples() -> Iterator[None]:
    yield
    for noted in (Sampling.traceparents, Sampling.taken, Sampling.sent):
        noted.clear()


@pytest.mark.usefixtures("no_samples")
@pytest.mark.parametrize("others", [[], [Guide]], ids=["alone", "with others"])
def test_each_inference_is_sampled_once_whatever_its_way(serve: Serve, others: list[type[Interceptor]]) -> None:
    def scenario(ports: Ports) -> None:
        for size in (2, 50_000):
            for _ in range(2):
                assert post(ports.http, size).status_code == 200
            for _ in range(2):
                call(ports.grpc, "", size)
            for _ in range(2):
                assert typed(ports.grpc, size) == size
        for _ in range(2):
            ports.server.infer("m", {"x": np.zeros((1, 2), np.float32)})
        with grpc_client.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
            arrived = threading.Semaphore(0)
            client.start_stream(lambda result, error: arrived.release())
            for _ in range(2):
                client.async_stream_infer("m", [tensor_of()])
                assert arrived.acquire(timeout=20)
            client.stop_stream()
        assert httpx.get(f"http://127.0.0.1:{ports.http}/v2/own/m").status_code == 200

    serve(scenario, Sampling, *others)
    assert Sampling.traceparents == ["m"] * 16
    taken = ["http infer m", "grpc infer m", "grpc infer m"] * 2 + ["program infer m", "grpc infer m"]
    assert Sampling.taken == taken
    assert Sampling.sent == ["http", "grpc", "grpc"] * 2
    assert Seen.answers == [("InferResponse", True)] * 8
    assert len(Seen.ends) == 8


@pytest.mark.usefixtures("no_samples")
def test_a_caller_that_is_left_out_is_not_made(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    post_init = Caller.__post_init__

    def note(caller: Caller) -> None:
        made.append(caller.transport)
        post_init(caller)

    def scenario(ports: Ports) -> None:
        monkeypatch.setattr(Caller, "__post_init__", note)
        for _ in range(3):
            post(ports.http)
            call(ports.grpc, "")

    serve(scenario, Sampling)
    assert made == ["grpc"] * 3


@pytest.mark.usefixtures("no_samples")
def test_an_interceptor_may_take_each_request_with_a_trace_context(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        post(ports.http, traceparent="00-1")
        with grpc_client.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
            client.infer("m", [tensor_of()])
            client.infer("m", [tensor_of()], headers={"traceparent": "00-2"})

    serve(scenario, Sampling)
    assert Sampling.taken == ["http infer m", "grpc infer m", "grpc infer m"]


class Sparing(Sampling):
    """Permits the next three inferences in each call."""

    def samples(self, operation: AnyOperation, model: Callable[[], str], traceparent: str) -> bool:
        self.traceparents.append(traceparent)
        self.spared = self.spared or 3
        return True


@pytest.mark.usefixtures("no_samples")
def test_inferences_that_are_spared_are_left_out_without_a_question(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        for _ in range(3):
            post(ports.http)
            call(ports.grpc, "")
            post(ports.http, 50_000)
        post(ports.http, traceparent="00-1")

    serve(scenario, Sparing)
    assert Sampling.traceparents == ["", "", "", "00-1"]
    assert Sampling.taken == ["http infer m", "grpc infer m", "http infer m", "http infer m"]


# ---------------------------------------------------------------------- an interceptor that permits inferences


class Permitting(Interceptor):
    """Admits the bearer of a word, and permits its next inferences with the same model."""

    name = "permitting"
    admitted: ClassVar[list[str]] = []
    made: ClassVar[dict[str | bytes, dict[str, str]]] = {}

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.permits = self.made

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        self.admitted.append(f"{caller.transport} {operation} {model}")
        header = caller.header("authorization")
        if header != "please":
            raise Unauthenticated("say the word")
        caller.principal = "alice"
        if operation is Operation.INFER:
            for form in (header, header.encode()):
                self.made.setdefault(form, {})[model] = "alice"


@pytest.fixture
def no_permits() -> Iterator[None]:
    yield
    Permitting.admitted.clear()
    Permitting.made.clear()


def call_with(ports: Ports, *words: str, size: int = 2) -> str:
    """Return the code of an inference over gRPC, whose metadata have ``words``: ``name=value``, or a credential."""
    request = service_pb2.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=[1, size]).contents.fp32_contents.extend([0.5] * size)
    named = [word.partition("=") if "=" in word else ("authorization", "=", word) for word in words]
    metadata = tuple((name, value) for name, _, value in named)
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        call: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(
            request, metadata=metadata, timeout=30
        )
        return str(call.code().name)


@pytest.mark.usefixtures("no_permits")
def test_a_permitted_inference_is_not_admitted_again(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        for _ in range(3):
            assert post(ports.http, authorization="please").status_code == 200
            assert call_with(ports, "please") == "OK"
        assert Permitting.admitted == ["http infer m"]
        Permitting.made.clear()
        assert call_with(ports, "please") == "OK"
        assert post(ports.http, authorization="please").status_code == 200
        assert Permitting.admitted.pop() == "grpc infer m"
        assert Permitting.admitted == ["http infer m"]

    serve(scenario, Permitting)


@pytest.mark.usefixtures("no_permits")
def test_inference_without_a_permit_is_admitted(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        assert post(ports.http, authorization="please").status_code == 200
        Permitting.admitted.clear()
        for word in ("now", "", "Please"):
            assert post(ports.http, authorization=word).status_code == 401
        assert [call_with(ports, word) for word in ("now", "Please", "")] == ["UNAUTHENTICATED"] * 3
        assert call_with(ports) == "UNAUTHENTICATED"
        assert len(Permitting.admitted) == 3 + 4
        Permitting.admitted.clear()
        # Rare ones are admitted, as are all operations that are no inference.
        assert call_with(ports, "please", "now") == "OK"  # the interceptor reads the first one
        assert post(ports.http, 50_000, authorization="please").status_code == 200
        assert call_with(ports, "please", size=50_000) == "OK"
        url = f"http://127.0.0.1:{ports.http}/v2/models/m"
        assert httpx.get(url, headers={"authorization": "please"}).status_code == 200
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}
        for path, sent, status in (
            ("m", {"triton-request-timeout": "5000000"}, 200),
            ("m", {"content-encoding": "br"}, 501),
            ("none", {}, 404),
        ):
            sent = {"authorization": "please", **sent}
            where = f"http://127.0.0.1:{ports.http}/v2/models/{path}/infer"
            response = httpx.post(where, json={"inputs": [tensor]}, headers=sent)
            assert response.status_code == status, response.text
        assert len(Permitting.admitted) >= 6

    serve(scenario, Permitting)


@pytest.mark.usefixtures("no_permits")
def test_a_permitted_request_has_its_sender(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    senders: list[Any] = []

    def note(view: ModelView, ticket: Ticket, call: Any = None) -> None:
        senders.append(ticket.request.sender)
        if senders[-1] is not None:
            sender = senders[-1]
            senders[-1] = (sender.transport, sender.peer, sender.principal, str(sender.operation), sender.model)
            senders[-1] += (sender.header("x-user"), dict(sender.trace_context), sender.deadline_ns > 0, sender.parent)
        check_and_enqueue(view, ticket, call)

    def scenario(ports: Ports) -> None:
        for _ in range(2):
            post(ports.http, user="bob", authorization="please", traceparent="00-1")
            call_with(ports, "please", "x-user=bob", "traceparent=00-1")

    monkeypatch.setattr("headrace.models.submission.check_and_enqueue", note)
    serve(scenario, Permitting)
    assert len(Permitting.admitted) == 1
    sender = "127.0.0.1", "alice", "infer", "m", "bob", {"traceparent": "00-1"}
    assert senders[-2:] == [("http", *sender, False, None), ("grpc", *sender, True, None)]


@pytest.mark.usefixtures("no_permits")
def test_an_invalid_permitted_request_is_refused(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        assert post(ports.http, authorization="please").status_code == 200
        tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [1]}
        url = f"http://127.0.0.1:{ports.http}/v2/models/m/infer"
        for document in ("{", '{"inputs": []}', json.dumps({"inputs": [tensor]})):
            responses = []
            for _ in range(2):  # permitted, then admitted
                response = httpx.post(url, content=document, headers={"authorization": "please"})
                responses.append((response.status_code, response.text))
                Permitting.made.clear()
            assert responses[0] == responses[1]
            assert responses[0][0] >= 400
            assert post(ports.http, authorization="please").status_code == 200
        request = service_pb2.ModelInferRequest(model_name="m")
        with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            call: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(
                request, metadata=(("authorization", "please"),), timeout=30
            )
            assert call.code().name == "INVALID_ARGUMENT"

    serve(scenario, Permitting)


class Sleeping(Sampling):
    """Takes no inference, as an audit log."""

    name = "sleeping"
    follows_trace_context = False
    refusals: ClassVar[list[str]] = []

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.spared = 1000

    def samples(self, operation: AnyOperation, model: Callable[[], str], traceparent: str) -> bool:
        return operation.category not in ("inference", "health")

    def refused(self, caller: Caller, error: HeadraceError) -> None:
        self.refusals.append(f"{caller.operation} {caller.model} {error.message}")


@pytest.mark.usefixtures("no_permits", "no_samples")
def test_inferences_are_permitted_beside_interceptors_that_take_none(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        for _ in range(3):
            assert post(ports.http, authorization="please").status_code == 200
            assert call_with(ports, "please") == "OK"
        assert Permitting.admitted == ["http infer m"]
        assert post(ports.http, authorization="no").status_code == 401
        assert call_with(ports, "no") == "UNAUTHENTICATED"
        url = f"http://127.0.0.1:{ports.http}/v2/models/m"
        assert httpx.get(url, headers={"authorization": "please"}).status_code == 200

    serve(scenario, Sleeping, Permitting)
    assert Sleeping.refusals == ["infer m say the word"] * 2
    assert Sleeping.taken == ["http model_metadata m"]
    Sleeping.refusals.clear()


@pytest.mark.usefixtures("no_permits", "no_samples")
def test_beside_others_every_inference_is_admitted(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        for _ in range(3):
            assert post(ports.http, authorization="please").status_code == 200

    serve(scenario, Permitting, Guide)
    assert Permitting.admitted == ["http infer m"] * 3


# ---------------------------------------------------------------------- an interceptor that meters inferences


class Metered(Interceptor, Meter):
    """Counts inferences of a principal and of an address by itself, unless it is full."""

    name = "metered"
    calls: ClassVar[list[str]] = []
    open: ClassVar[list[str]] = []

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.meters = {("alice", "m"): self, (("127.0.0.1",), "m"): self}

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        self.calls.append(f"admit {caller.principal} {model}")

    def begin(self, model: ModelView, size_bytes: int) -> bool:
        self.calls.append(f"begin {model.name} {size_bytes > 0}")
        if "full" in self.open:
            self.open.clear()
            return False
        self.open.append(model.name)
        return True

    def end(self) -> None:
        self.calls.append("end")
        self.open.pop()

    def take_back(self, size_bytes: int) -> None:
        self.calls.append("take back")
        self.open.pop()


@pytest.fixture
def no_meters() -> Iterator[None]:
    yield
    Metered.calls.clear()
    Metered.open.clear()


def new_calls() -> list[str]:
    calls = Metered.calls[:]
    Metered.calls.clear()
    return calls


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.usefixtures("no_permits", "no_records", "no_meters")
def test_a_permitted_inference_is_metered_in_place_of_admission(serve: Serve, is_recorded: bool) -> None:
    def scenario(ports: Ports) -> None:
        assert post(ports.http, authorization="please").status_code == 200
        assert new_calls() == ["admit alice m"]
        Records.admitted.clear()
        Permitting.admitted.clear()
        assert post(ports.http, authorization="please").status_code == 200
        assert call_with(ports, "please") == "OK"
        assert new_calls() == ["begin m True", "end"] * 2
        assert Permitting.admitted == Records.admitted == []
        assert len(Records.made) == 2 * is_recorded
        # An invalid one is refused; an unreadable one is admitted, and counted only there.
        url, sent = f"http://127.0.0.1:{ports.http}/v2/models/m/infer", {"authorization": "please"}
        tensor = {"name": "z", "datatype": "FP32", "shape": [1, 1], "data": [1]}
        assert httpx.post(url, json={"inputs": [tensor]}, headers=sent).status_code == 400
        assert new_calls() == ["begin m True", "end"]
        assert httpx.post(url, content="{", headers=sent).status_code >= 400
        assert new_calls() == ["begin m True", "take back", "admit alice m"]
        assert call_with(ports, "please", size=50_000) == "OK"  # too large to be parsed on the event loop
        assert new_calls() == ["admit alice m"]
        Metered.open.append("full")
        assert post(ports.http, authorization="please").status_code == 200
        Metered.open.append("full")
        assert call_with(ports, "please") == "OK"
        assert new_calls() == ["begin m True", "admit alice m"] * 2
        assert Metered.open == []
        assert post(ports.http, authorization="no").status_code == 401
        assert new_calls() == []

    serve(scenario, *([Records] if is_recorded else []), Permitting, Metered)


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.usefixtures("no_records", "no_meters")
def test_a_caller_without_a_principal_is_metered_by_its_address(serve: Serve, is_recorded: bool) -> None:
    def scenario(ports: Ports) -> None:
        assert post(ports.http).status_code == 200
        assert call_with(ports) == "OK"
        assert new_calls() == ["begin m True", "end"] * 2
        ask_both(ports, model="none")
        assert new_calls() == ["admit  none"] * 2

    serve(scenario, *([Records] if is_recorded else []), Metered)


@pytest.mark.usefixtures("no_permits", "no_meters")
def test_a_meter_before_the_one_that_names_the_principal_is_not_used(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        for _ in range(2):
            assert post(ports.http, authorization="please").status_code == 200
        assert new_calls() == ["admit  m"] * 2

    serve(scenario, Metered, Permitting)


# ---------------------------------------------------------------------- an interceptor that gets records


class Records(Interceptor):
    """Gets the records of inferences, and admits all others."""

    name = "records"
    made: ClassVar[list[tuple[Any, ...]]] = []
    admitted: ClassVar[list[str]] = []

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.recorder = SimpleNamespace(add=self.made.append)

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        self.admitted.append(f"{caller.transport} {operation} {model}")

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> None:
        self.admitted.append(request.id)


@pytest.fixture
def no_records() -> Iterator[None]:
    yield
    Records.made.clear()
    Records.admitted.clear()


def ask_both(ports: Ports, model: str = "m", name: str = "x", size: int = 2) -> None:
    """One inference over HTTP and one over gRPC, which may be refused."""
    tensor = {"name": name, "datatype": "FP32", "shape": [1, size], "data": [0.5] * size}
    document, sent = {"id": "r" * 300, "inputs": [tensor]}, {"traceparent": "00-1"}
    httpx.post(f"http://127.0.0.1:{ports.http}/v2/models/{model}/infer", json=document, headers=sent)
    request_input = grpc_client.InferInput(name, [1, size], "FP32")
    request_input.set_data_from_numpy(np.full((1, size), 0.5, np.float32))
    with grpc_client.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client, suppress(InferenceServerException):
        client.infer(model, [request_input], request_id="r" * 300, headers=sent)


@pytest.mark.usefixtures("no_records")
def test_a_recorder_gets_records_in_place_of_callers(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        ask_both(ports)
        ask_both(ports, name="z")
        assert Records.admitted == []
        ask_both(ports, model="none")
        post(ports.http, 50_000)
        typed(ports.grpc, 50_000)
        assert httpx.get(f"http://127.0.0.1:{ports.http}/v2/models/m").status_code == 200

    serve(scenario, Records)
    made = [FinishedInference._make(each) for each in Records.made]
    assert [each.transport for each in made] == ["http", "grpc"] * 2
    for each in made:
        assert (each.model, each.version, each.id, each.traceparent) == ("m", 1, "r" * 256, "00-1")
        assert (each.peer, each.principal, each.request_bytes, each.times) == ("127.0.0.1", "", 8, None)
        assert each.arrival_ns < each.ended_ns
    assert [(each.code, each.response_bytes) for each in made] == [(None, 8)] * 2 + [(Code.INVALID_ARGUMENT, 0)] * 2
    assert all(each.arrival_ns < each.queued_ns < each.ended_ns for each in made[:2])
    large = ["", "http infer m", "", "grpc infer m"]
    assert sorted(Records.admitted) == sorted(["http infer none", "grpc infer none", *large, "http model_metadata m"])


@pytest.mark.usefixtures("no_records", "no_permits")
def test_a_recorder_gets_records_of_permitted_inferences(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        assert post(ports.http, authorization="please").status_code == 200
        assert Permitting.admitted == ["http infer m"]
        Records.admitted.clear()
        assert post(ports.http, authorization="please").status_code == 200
        assert call_with(ports, "please") == "OK"
        assert (Records.admitted, len(Records.made)) == ([], 2)
        assert post(ports.http, authorization="no").status_code == 401
        assert call_with(ports, "no") == "UNAUTHENTICATED"
        assert call_with(ports, "please", "no") == "OK"
        assert Permitting.admitted[1:] == ["http infer m", "grpc infer m", "grpc infer m"]

    serve(scenario, Records, Permitting)
    made = [FinishedInference._make(each) for each in Records.made]
    assert [(each.transport, each.principal, each.model, each.code) for each in made] == [
        ("http", "alice", "m", None),
        ("grpc", "alice", "m", None),
    ]


@pytest.mark.usefixtures("no_records")
def test_a_recorder_beside_an_interceptor_that_refuses_gets_callers(serve: Serve) -> None:
    serve(ask_both, Records, Guide)
    assert Records.made == []
    assert sorted(Records.admitted) == sorted(["http infer m", "r" * 300, "grpc infer m", "r" * 300])


@pytest.mark.usefixtures("no_records", "no_samples")
def test_inference_sampled_by_another_interceptor_has_a_caller_for_both(serve: Serve) -> None:
    def scenario(ports: Ports) -> None:
        for _ in range(2):
            post(ports.http)
            call(ports.grpc, "")

    serve(scenario, Records, Sampling)
    assert Sampling.traceparents == ["m"] * 4
    assert Sampling.taken == ["grpc infer m"] * 2
    assert [FinishedInference._make(each).transport for each in Records.made] == ["http"] * 2
    assert Records.admitted == ["grpc infer m", ""] * 2


@pytest.mark.usefixtures("no_records")
def test_a_caller_that_disconnects_is_recorded(serve: Serve, write_model: Any) -> None:
    slow = f'{CONFIG} parameters {{ key: "execute_delay_ms" value {{ string_value: "300" }} }}'

    def scenario(ports: Ports) -> None:
        with grpc_client.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client, suppress(InferenceServerException):
            client.infer("slow", [tensor_of()], client_timeout=0.1)
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}
        with suppress(httpx.TimeoutException):
            httpx.post(f"http://127.0.0.1:{ports.http}/v2/models/slow/infer", json={"inputs": [tensor]}, timeout=0.1)
        call(ports.grpc, "")
        ports.server.infer("slow", {"x": np.zeros((1, 1), np.float32)})  # behind both

    write_model("slow", slow)
    serve(scenario, Records)
    made = [FinishedInference._make(each) for each in Records.made]
    assert sorted((each.transport, each.model, str(each.code)) for each in made) == [
        ("grpc", "m", "None"), ("grpc", "slow", str(Code.CANCELLED)), ("http", "slow", str(Code.CANCELLED))
    ]  # fmt: skip
