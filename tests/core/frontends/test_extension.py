"""Extensions in a real server: their additions over HTTP and gRPC, on every host, their names and their metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any, ClassVar

import grpc
import httpx
import numpy as np
import pytest

from headrace import (
    Caller,
    Extension,
    ExtensionOperation,
    GrpcMethod,
    HttpCall,
    HttpReply,
    HttpRoute,
    InferRequest,
    NotFound,
    Operation,
    PublishedMetric,
    ServedModel,
    hookimpl,
)
from headrace.errors import ConfigError, LoadError, OperatorError, PluginError
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace.server import Server
from tests.core.conftest import IDENTITY

CHAT = ExtensionOperation("chat")


class Query(HttpRoute):
    name = "GET /chat[/{room}]/query"
    operation = CHAT

    async def answer(self, call: HttpCall) -> HttpReply:
        self.extension.calls += 1
        return HttpReply(200, (), (repr((call.values["room"], call.query)).encode(),))


class Reverse(GrpcMethod):
    name = "/acme.Chat/Reverse"
    operation = CHAT

    async def answer(self, request: bytes, caller: Caller) -> bytes:
        if request == b"no":
            raise NotFound("nothing")
        return request[::-1]


class Number(GrpcMethod):
    """Parses its requests, and answers each by two."""

    name = "/acme.Chat/Count"
    operation = CHAT
    closed: ClassVar[int] = 0

    @staticmethod
    def parse(message: bytes) -> int:
        return int(message)

    async def stream(self, requests: AsyncIterator[int], caller: Caller) -> AsyncIterator[bytes]:
        try:
            async for number in requests:
                yield b"%d" % number
                yield b"%d" % -number
        finally:
            Number.closed += 1


class Chat(Extension):
    name = "chat"
    announces = ("zz_chat", "trace")
    adds = (Query, Reverse, Number)
    metrics = (PublishedMetric("headrace_chat_asked_total", "Questions.", "counter"),)
    made: ClassVar[list[Chat]] = []
    is_closed = False
    calls = 0

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.made.append(self)

    def measure(self) -> dict[str, float]:
        return {"headrace_chat_asked_total": self.calls}

    def close(self) -> None:
        self.is_closed = True


class Off(Extension):
    name = "off"
    announces = ("off",)
    enabled = False


@pytest.fixture
def hosts() -> tuple[str, str]:
    """The hosts of HTTP and gRPC. Plugins' tests have their own."""
    return "native", "native"


@pytest.fixture
def use(hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds a plugin with these extensions to every server that is made."""

    def install(*extensions: type[Extension]) -> None:
        plugin, discover = ModuleType("test"), Plugins.discover
        plugin.register_extensions = hookimpl(lambda: list(extensions))  # type: ignore[attr-defined]

        def more(allow: Any = None) -> Plugins:
            plugins = discover([host for host in hosts if host != "native"])
            plugins._add(PluginInfo("test", "test", "0"), lambda: plugin)
            return plugins

        monkeypatch.setattr(Plugins, "discover", more)

    return install


@pytest.fixture
def serve(hosts: tuple[str, str], make_server: Callable[..., Server]) -> Callable[..., None]:
    """Runs ``scenario(server, ports)`` on a thread, against a server that has no models."""
    http_server, grpc_server = hosts

    def run(scenario: Callable[[Server, dict[str, int]], None], **options: Any) -> None:
        async def main() -> None:
            local = {f"{name}_{key}": value for name in ("http", "grpc", "metrics") for key, value in
                     (("address", "127.0.0.1"), ("port", 0))}  # fmt: skip
            how = {"http_server": http_server, "grpc_server": grpc_server, "exit_timeout_secs": 5}
            server = make_server(**local, **how, model_control_mode="explicit", **options)
            async with server:
                await server.start_frontends()
                ports = {each.protocol or each.name: each.port for each in server.frontends}  # type: ignore[attr-defined]
                await asyncio.to_thread(scenario, server, ports)

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


def test_an_extension_answers_over_http_and_grpc_and_is_measured_and_closed(
    use: Callable[..., None], serve: Callable[..., None]
) -> None:
    use(Chat, Off)
    Chat.made.clear()
    Number.closed = 0

    def scenario(server: Server, ports: dict[str, int]) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{ports['http']}") as client:
            assert client.get("/chat/query?a=1&a=2&b=&c=%20x").text == "('', {'a': ['1', '2'], 'b': [''], 'c': [' x']})"
            assert client.get("/chat/blue/query").text == "('blue', {})"
            assert client.get("/chat/query?" + "&".join("a=1" for _ in range(1001))).status_code == 400
            assert client.post("/chat/query").status_code == 405
        page = httpx.get(f"http://127.0.0.1:{ports['metrics']}/metrics").text
        assert "headrace_chat_asked_total 3\n" in page
        with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
            reverse = channel.unary_unary("/acme.Chat/Reverse", bytes, bytes)
            assert reverse(b"abc") == b"cba"
            assert reverse(b"x" * 100_000 + b"y")[:2] == b"yx"
            with pytest.raises(grpc.RpcError) as refused:
                reverse(b"no")
            assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.NOT_FOUND, "nothing")
            numbers = channel.stream_stream("/acme.Chat/Count", bytes, bytes)
            assert list(numbers(iter([b"1", b"20"]))) == [b"1", b"-1", b"20", b"-20"]
            with pytest.raises(grpc.RpcError) as malformed:
                list(numbers(iter([b"x"])))
            assert malformed.value.code() is grpc.StatusCode.INTERNAL
            assert malformed.value.details() == "Unable to parse request"
        extensions = server.metadata().extensions
        assert extensions[-2:] == ["trace", "zz_chat"], "Triton's names come first, in Triton's order"

    serve(scenario)
    (made,) = Chat.made
    assert made.is_closed
    assert Number.closed == 2


def test_a_path_and_a_method_of_an_extension_that_is_not_installed_are_free(
    use: Callable[..., None], serve: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    from headrace_hosts.absent_extensions import note_absent

    note_absent.cache_clear()

    class Logging(HttpRoute):
        name = "GET /v2/logging"

        async def answer(self, call: HttpCall) -> HttpReply:
            return HttpReply(204 + 2)

    class Settings(GrpcMethod):
        name = "/inference.GRPCInferenceService/LogSettings"
        operation = CHAT

        async def answer(self, request: bytes, caller: Caller) -> bytes:
            return b""

    class Own(Extension):
        name = "own"
        adds = (Logging, Settings)

    use(Own)

    def scenario(server: Server, ports: dict[str, int]) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{ports['http']}") as client:
            assert client.get("/v2/logging").status_code == 206
            refused = client.post("/v2/models/m/generate", json={})
            assert (refused.status_code, refused.json()) == (
                501,
                {"error": "the generate extension is not available in this version of Headrace"},
            )
        with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
            assert channel.unary_unary("/inference.GRPCInferenceService/LogSettings", bytes, bytes)(b"") == b""

    with caplog.at_level(logging.INFO):
        serve(scenario)
    (line,) = [record.getMessage() for record in caplog.records if "a caller asks for" in record.getMessage()]
    assert line.startswith("a caller asks for the extension 'generate', which is not installed. ")
    assert "headrace-generate" in line


@pytest.mark.parametrize(
    ("name", "members", "reason"),
    [
        ("acme.Chat/Ask", ("answer",), "is named 'acme.Chat/Ask', not '/package.Service/Method'"),
        ("/acme.Chat/Ask", (), "has to have either 'answer' or 'stream'"),
        ("/acme.Chat/Ask", ("answer", "stream"), "has to have either 'answer' or 'stream'"),
        ("/acme.Chat/Ask", ("at_once",), "'answer' of method '/acme.Chat/Ask' is not async"),
        ("/acme.Chat/Ask", ("coroutine",), "'stream' of method '/acme.Chat/Ask' is a coroutine"),
        ("/acme.Chat/Ask", ("stream", "model_field"), "has 'stream' and 'model_field'"),
        ("", ("answer",), "adds the method Method, which has no name, but ''"),
        ("/inference.GRPCInferenceService/ModelInfer", ("answer",), "is one that Headrace itself answers"),
    ],
)
def test_a_method_that_is_none_or_headraces_own_breaks_its_plugin(
    use: Callable[..., None], name: str, members: tuple[str, ...], reason: str
) -> None:
    async def answer(self: Any, request: bytes, caller: Caller) -> bytes:
        return request

    async def stream(self: Any, requests: Any, caller: Caller) -> AsyncIterator[bytes]:
        yield b""

    all_members: dict[str, tuple[str, Any]] = {
        "answer": ("answer", answer),
        "stream": ("stream", stream),
        "at_once": ("answer", lambda self, request, caller: request),
        "coroutine": ("stream", answer),
        "model_field": ("model_field", (1, "model")),
    }
    has = dict(all_members[member] for member in members)
    method = type("Method", (GrpcMethod,), {"name": name, "operation": CHAT, **has})
    use(type("Added", (Extension,), {"name": "added", "adds": (method,)}))
    assert reason in Plugins.discover().complaints[0]


def test_two_methods_of_one_name_are_an_error_that_names_both(use: Callable[..., None]) -> None:
    use(Chat, type("Other", (Extension,), {"name": "other", "adds": (Reverse,)}))
    plugins = Plugins.discover()
    assert "method '/acme.Chat/Reverse' is registered by both 'test' of test 0 and" in plugins.complaints[0]
    with pytest.raises(LoadError, match="registered by both"):
        list(plugins.extensions)


def test_an_extension_that_can_not_be_made_is_named(use: Callable[..., None], make_server: Any) -> None:
    class Broken(Extension):
        name = "broken"

        def __init__(self, engine: Any) -> None:
            raise KeyError("lost")

    use(Broken)
    with pytest.raises(PluginError, match="extension 'broken' cannot start: KeyError: 'lost'"):
        make_server().engine.additions(HttpRoute)


class Watching(Extension):
    """Notes the models of its server, of which it reads a parameter."""

    name = "watching"
    model_parameters = ("watched",)
    seen: ClassVar[list[Watching]] = []

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.models: list[str] = []
        self.seen.append(self)

    @hookimpl
    def observe_model(self, model: ServedModel) -> None:
        if model.config.parameters["watched"].string_value == "no":
            raise ConfigError("not to be watched")

    @hookimpl
    def model_loaded(self, model: ServedModel) -> None:
        self.models.append(f"+{model.name}")

    @hookimpl
    def model_unloaded(self, model: ServedModel) -> None:
        self.models.append(f"-{model.name}")


def test_hooks_of_an_extension_are_called_for_its_own_server_only(
    use: Callable[..., None], write_model: Callable[..., Any], make_server: Any
) -> None:
    watched = 'parameters {{ key: "watched" value {{ string_value: "{}" }} }}'
    write_model("one", IDENTITY + watched.format("yes"))
    write_model("two", IDENTITY + watched.format("no"))
    use(Watching)
    Watching.seen.clear()

    async def scenario() -> None:
        how = {"model_control_mode": "explicit", "strict_parameters": True}
        async with make_server(**how) as first, make_server(**how) as second:
            await first.load("one")
            mine, others = Watching.seen
            assert (mine.engine, mine.models, others.models) == (first.engine, ["+one"], [])
            with pytest.raises(OperatorError, match="not to be watched"):
                await second.load("two")
            await first.unload("one")
        assert (mine.models, others.models) == (["+one", "-one"], [])

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_server_without_frontends_does_without_an_extension_that_can_not_be_made(
    use: Callable[..., None], make_server: Any
) -> None:
    class Lost(Extension):
        name = "lost"

        def __init__(self, engine: Any) -> None:
            raise KeyError("lost")

    use(Lost)
    with make_server() as server:
        assert server.engine.ready


def test_addition_of_another_class_breaks_its_plugin(use: Callable[..., None]) -> None:
    use(type("Added", (Extension,), {"name": "added", "adds": (int,)}))
    assert "adds <class 'int'>, which is no subclass of Addition" in Plugins.discover().complaints[0]


class Generate(HttpRoute):
    """Triton's path, with inputs by name in the body and outputs by name in the answer."""

    name = "POST /v2/models/{name}/generate"
    operation = Operation.GENERATE

    async def answer(self, call: HttpCall) -> HttpReply:
        inputs = {name: np.array(value, np.float32) for name, value in json.loads(bytes(call.request.body)).items()}
        answered: dict[str, Any] = {"model_name": call.values["name"]}
        async for response in self.engine.responses(InferRequest(call.values["name"], inputs), call.caller):
            answered |= {name: np.asarray(tensor).tolist() for name, tensor in response.outputs.items()}
        return HttpReply(200, [(b"Content-Type", b"application/json")], [json.dumps(answered).encode()])


class Generation(Extension):
    name = "generation"
    announces = ("generate",)
    adds = (Generate,)


def test_generate_is_answered_by_the_extension_that_has_it(
    use: Callable[..., None], serve: Callable[..., None], write_model: Callable[..., Any]
) -> None:
    use(Generation)
    io = '{ name: "%s" data_type: TYPE_FP32 dims: [ 2 ] }'
    write_model("m", f'backend: "identity" input [ {io % "x"} ] output [ {io % "y"} ]')

    def scenario(server: Server, ports: dict[str, int]) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{ports['http']}") as client:
            assert client.post("/v2/models/m/generate", json={"x": [1, 2]}).json() == {"model_name": "m", "y": [1, 2]}
            unknown = client.post("/v2/models/n/generate", json={"x": [1, 2]})
            assert (unknown.status_code, unknown.json()["error"][:28]) == (404, "Request for unknown model: '")
            assert client.post("/v2/models/m/generate_stream", json={}).status_code == 501
        assert "generate" in server.metadata().extensions

    serve(scenario, load_model=["m"])
