"""Code of plugins that raises an exception that is no `Exception`: one request fails, with a log line, and nothing
else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType
from typing import Any, ClassVar

import grpc
import httpx
import numpy as np
import pytest

from headrace import (
    AnyOperation,
    Caller,
    Extension,
    ExtensionOperation,
    GrpcMethod,
    HttpCall,
    HttpReply,
    HttpRoute,
    HttpStream,
    InferRequest,
    Interceptor,
    InternalError,
    ModelView,
    Outcome,
    Watch,
    hookimpl,
)
from headrace.errors import plugin_failure
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace.server import Server
from headrace.telemetry import log_limits

ASK = ExtensionOperation("ask", "health")
#: Ways in which a plugin exits. Each call makes a new exception.
EXITS: dict[str, Callable[[], BaseException]] = {"exit": lambda: SystemExit(3), "cancel": asyncio.CancelledError}
LIMIT_S = 10


async def leave(how: str) -> None:
    """Raise the exception ``how``; the `CancelledError` is that of a task which somebody has cancelled."""
    if how == "cancel":
        task = asyncio.get_running_loop().create_task(asyncio.sleep(60))
        task.cancel()
        await task
    raise EXITS[how]()


class Ask(HttpRoute):
    name = "GET /ask/{how}"
    operation = ASK

    async def answer(self, call: HttpCall) -> HttpReply:
        if call.values["how"] != "well":
            await leave(call.values["how"])
        return HttpReply(200)


class Stream(HttpRoute):
    name = "GET /stream/{how}"
    operation = ASK

    async def answer(self, call: HttpCall) -> HttpStream:
        return HttpStream(200, [], self._chunks(call.values["how"]))

    async def _chunks(self, how: str) -> AsyncIterator[bytes]:
        await leave(how)
        yield b"never"


class Method(GrpcMethod):
    name = "/acme.Exits/Ask"
    operation = ASK

    async def answer(self, request: bytes, caller: Caller) -> bytes:
        if request != b"well":
            await leave(request.decode())
        return request


class Methods(GrpcMethod):
    name = "/acme.Exits/Stream"
    operation = ASK

    async def stream(self, requests: AsyncIterator[bytes], caller: Caller) -> AsyncIterator[bytes]:
        async for request in requests:
            await leave(request.decode())
            yield b"never"


class Exits(Extension):
    name = "exits"
    adds = (Ask, Stream, Method, Methods)


class Guard(Interceptor):
    """Raises ``how`` at ``place``."""

    name = "guard"
    how: ClassVar[str] = ""
    place: ClassVar[str] = ""

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Any:
        if self.place == "at once":
            raise EXITS[self.how]()
        return leave(self.how) if self.place == "later" else _Eyes(self)

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> None:
        if self.place == "intercept":
            raise EXITS[self.how]()


class _Eyes(Watch):
    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def ended(self, outcome: Outcome) -> None:
        if self._guard.place == "end":
            raise EXITS[self._guard.how]()


class Notes(Interceptor):
    """Notes how operations end."""

    name = "notes"
    ends: ClassVar[list[str]] = []

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch:
        return _Ends()


class _Ends(Watch):
    def ended(self, outcome: Outcome) -> None:
        Notes.ends.append(type(outcome.error).__name__)


@pytest.fixture
def hosts() -> tuple[str, str]:
    """The hosts of HTTP and gRPC. Plugins' tests have their own."""
    return "native", "native"


Scenario = Callable[[httpx.AsyncClient, grpc.aio.Channel, Server], Awaitable[None]]


@pytest.fixture
def serve(
    hosts: tuple[str, str], make_server: Callable[..., Server], write_model: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Runs a scenario against a server with the plugin above. Nothing but the scenario ends the loop."""
    discover = Plugins.discover
    Notes.ends.clear()
    log_limits.flush()

    def run(scenario: Scenario, *interceptors: type[Interceptor]) -> None:
        write_model(
            "m",
            'backend: "identity" max_batch_size: 8 '
            'input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ] '
            'output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]',
        )
        plugin = ModuleType("exits")
        plugin.register_extensions = hookimpl(lambda: [Exits])  # type: ignore[attr-defined]
        plugin.register_interceptors = hookimpl(lambda: list(interceptors))  # type: ignore[attr-defined]

        def more(allow: Any = None) -> Plugins:
            plugins = discover([host for host in hosts if host != "native"])
            plugins._add(PluginInfo("exits", "exits", "0"), lambda: plugin)
            return plugins

        monkeypatch.setattr(Plugins, "discover", more)

        async def main() -> None:
            local = {f"{name}_{key}": value for name in ("http", "grpc", "metrics") for key, value in
                     (("address", "127.0.0.1"), ("port", 0))}  # fmt: skip
            server = make_server(**local, http_server=hosts[0], grpc_server=hosts[1], exit_timeout_secs=5)
            async with server:
                await server.start_frontends()
                ports = {each.protocol or each.name: each.port for each in server.frontends}  # type: ignore[attr-defined]
                async with (
                    httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports['http']}", timeout=LIMIT_S) as http,
                    grpc.aio.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel,
                ):
                    await scenario(http, channel, server)

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


async def code_of(channel: grpc.aio.Channel, method: str, message: bytes) -> grpc.StatusCode:
    """Return the status of one call with one message."""
    try:
        if method == "Stream":
            call = channel.stream_stream(f"/acme.Exits/{method}", None, None)(iter([message]), timeout=LIMIT_S)
            async for _ in call:
                pass
        else:
            await channel.unary_unary(f"/acme.Exits/{method}", None, None)(message, timeout=LIMIT_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("interceptors", [(), (Notes,)], ids=["alone", "watched"])
@pytest.mark.parametrize("how", EXITS)
def test_a_route_or_method_fails_alone(
    serve: Callable[..., None], how: str, interceptors: tuple[type[Interceptor], ...], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(http: httpx.AsyncClient, channel: grpc.aio.Channel, server: Server) -> None:
        for path in ("ask", "stream"):
            reply = await http.get(f"/{path}/{how}")
            assert (reply.status_code, "its log has the reason" in reply.text) == (500, True)
        assert await code_of(channel, "Ask", how.encode()) is grpc.StatusCode.INTERNAL
        assert await code_of(channel, "Stream", how.encode()) is grpc.StatusCode.INTERNAL
        assert (await http.get("/ask/well")).status_code == 200
        assert await code_of(channel, "Ask", b"well") is grpc.StatusCode.OK

    with caplog.at_level(logging.ERROR):
        serve(scenario, *interceptors)
    failed = [record for record in caplog.records if record.levelno == logging.ERROR and record.exc_info]
    assert len(failed) == 4
    assert caplog.text.count(f"code of a plugin raised {type(EXITS[how]()).__name__}") == 4
    assert Notes.ends.count("NoneType") == 2 * len(interceptors)
    assert len(Notes.ends) == 6 * len(interceptors)
    assert "Cancelled" not in Notes.ends


@pytest.mark.parametrize("place", ["at once", "later", "intercept", "end"])
@pytest.mark.parametrize("how", EXITS)
def test_an_interceptor_refuses_the_operation_and_nothing_else(
    serve: Callable[..., None], how: str, place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(http: httpx.AsyncClient, channel: grpc.aio.Channel, server: Server) -> None:
        monkeypatch.setattr(Guard, "how", how)
        monkeypatch.setattr(Guard, "place", place)
        passes = place in ("intercept", "end")
        assert (await http.get("/ask/well")).status_code == (200 if passes else 500)
        status = await code_of(channel, "Ask", b"well")
        assert status is (grpc.StatusCode.OK if passes else grpc.StatusCode.INTERNAL)
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
        assert (await http.post("/v2/models/m/infer", json=body)).status_code == (200 if place == "end" else 500)
        inputs = {"x": np.zeros((1, 1), np.float32)}
        if place == "end":
            await asyncio.to_thread(server.infer, "m", inputs)
        else:
            with pytest.raises(InternalError):
                await asyncio.wait_for(asyncio.to_thread(server.infer, "m", inputs), LIMIT_S)
        monkeypatch.setattr(Guard, "place", "")
        assert (await http.post("/v2/models/m/infer", json=body)).status_code == 200

    serve(scenario, Guard)
    assert type(EXITS[how]()).__name__ in caplog.text


def test_a_key_of_the_operator_and_the_end_of_a_caller_are_not_the_plugins() -> None:
    for error in (KeyboardInterrupt(), GeneratorExit()):
        with pytest.raises(type(error)):
            plugin_failure(error)
    with pytest.raises(asyncio.CancelledError):
        plugin_failure(asyncio.CancelledError(), has_left=True)
    assert isinstance(plugin_failure(asyncio.CancelledError()), RuntimeError)
    assert plugin_failure(mistake := ValueError("a mistake")) is mistake
