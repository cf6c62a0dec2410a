"""Interceptors in a real server: over HTTP, gRPC, from a program; the same for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
from tritonclient import grpc as grpc_client
from tritonclient.utils import InferenceServerException

from headrace import (
    Caller,
    InferRequest,
    Interceptor,
    InvalidArgument,
    ModelView,
    Unavailable,
    Unsupported,
    builtins,
    hookimpl,
)  # fmt: skip
from headrace.engine import Engine
from headrace.models.entrance import start
from headrace.server import Server

CONFIG = """
backend: "identity"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


class Gate(Interceptor):
    """Lets those in who have the key, and says who they are."""

    name = "gate"

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> None:
        caller.principal = caller.header("x-user") or caller.principal
        if caller.header("x-user") == "mallory":
            raise Unsupported(f"{caller.principal} may not use {model.name}")


class Seen(Interceptor):
    """Notes what came by."""

    name = "seen"
    calls: ClassVar[list[tuple[str, str, str, str]]] = []
    answers: ClassVar[list[Any]] = []

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> Any:
        self.calls.append((caller.via, caller.peer, caller.principal, f"{model.name}/{model.version}"))
        return lambda answer, final: self.answers.append((type(answer).__name__, final))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> type[Seen]:
    monkeypatch.setattr(builtins, "register_interceptors", hookimpl(lambda: [Gate, Seen]), raising=False)
    Seen.calls.clear()
    Seen.answers.clear()
    return Seen


LISTEN = {"http_address": "127.0.0.1", "http_port": 0, "grpc_address": "127.0.0.1", "grpc_port": 0}


@pytest.fixture(params=[("auto", "native"), ("hypercorn", "grpcio")], ids="-".join)
def serve(
    request: pytest.FixtureRequest, write_model: Any, make_server: Callable[..., Server]
) -> Callable[[Callable[[Server, int, int], Any]], None]:
    """Runs a scenario on a thread, against a server with its HTTP and gRPC ports."""
    http_server, grpc_server = request.param

    def run(scenario: Callable[[Server, int, int], Any]) -> None:
        write_model("m", CONFIG)

        async def main() -> None:
            how = {"http_server": http_server, "grpc_server": grpc_server, "allow_metrics": False}
            server = make_server(**LISTEN, **how, exit_timeout_secs=5)
            async with server:
                await server.start_frontends()
                ports = {frontend.name: frontend.port for frontend in server.frontends}  # type: ignore[attr-defined]
                await asyncio.to_thread(scenario, server, ports["http"], ports["grpc"])

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


def post(port: int, size: int = 2, user: str = "") -> httpx.Response:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, size], "data": [0.5] * size}
    return httpx.post(f"http://127.0.0.1:{port}/v2/models/m/infer", json={"inputs": [tensor]}, headers={"X-User": user})


def call(port: int, user: str, size: int = 2) -> Any:
    with grpc_client.InferenceServerClient(f"127.0.0.1:{port}") as client:
        tensor = grpc_client.InferInput("x", [1, size], "FP32")
        tensor.set_data_from_numpy(np.full((1, size), 0.5, np.float32))
        return client.infer("m", [tensor], headers={"x-user": user})


def test_interceptors_see_requests_and_answers_of_every_protocol(serve: Any, seen: type[Seen]) -> None:
    def scenario(server: Server, http: int, grpc: int) -> None:
        assert post(http, user="alice").status_code == 200
        call(grpc, "bob")
        server.infer("m", {"x": np.zeros((1, 2), np.float32)})

    serve(scenario)
    assert seen.calls == [
        ("http", "127.0.0.1", "alice", "m/1"),
        ("grpc", "127.0.0.1", "bob", "m/1"),
        ("program", "", "", "m/1"),
    ]
    assert seen.answers == [("InferResponse", True)] * 3


def test_a_request_that_a_thread_reads_is_seen_too(serve: Any, seen: type[Seen]) -> None:
    def scenario(server: Server, http: int, grpc: int) -> None:
        assert post(http, 50_000, "alice").status_code == 200

    serve(scenario)
    assert seen.calls == [("http", "127.0.0.1", "alice", "m/1")]
    assert seen.answers == [("InferResponse", True)]


def test_a_refusal_is_the_protocols_own_and_nothing_runs(serve: Any, seen: type[Seen]) -> None:
    def scenario(server: Server, http: int, grpc: int) -> None:
        reply = post(http, user="mallory")
        assert (reply.status_code, reply.json()) == (501, {"error": "mallory may not use m"})
        with pytest.raises(InferenceServerException, match="mallory may not use m"):
            call(grpc, "mallory")
        assert server.resolve("m").snapshot().executions.execution_count == 0

    serve(scenario)
    assert seen.calls == []  # it stands behind the gate


def test_a_request_refused_behind_an_interceptor_is_its_answer(serve: Any, seen: type[Seen]) -> None:
    def scenario(server: Server, http: int, grpc: int) -> None:
        wrong = {"inputs": [{"name": "z", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
        assert httpx.post(f"http://127.0.0.1:{http}/v2/models/m/infer", json=wrong).status_code == 400

    serve(scenario)
    assert seen.answers == [("InvalidArgument", True)]


def test_an_interceptor_that_raises_at_an_answer_keeps_it_from_nobody(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Clumsy(Interceptor):
        name = "clumsy"

        def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> Any:
            return lambda answer, final: 1 / 0

    monkeypatch.setattr(builtins, "register_interceptors", hookimpl(lambda: [Clumsy]), raising=False)
    serve(lambda server, http, grpc: post(http).raise_for_status())
    assert "a watcher failed at an answer of model" in caplog.text


class First(Interceptor):
    """Notes when it is asked and when it sees an answer, and refuses a request that says so."""

    name: ClassVar[str] = "first"
    events: ClassVar[list[str]] = []

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> Any:
        self.events.append(f"{self.name} is asked")
        if request.parameters.get("refused_by") == self.name:
            raise Unsupported(f"{self.name} refuses")
        return lambda answer, final: self.events.append(f"{self.name} sees {type(answer).__name__}")


class Second(First):
    name = "second"


class Third(First):
    name = "third"


@pytest.mark.parametrize("order", [(First, Second, Third), (Third, First, Second)])
def test_interceptors_are_asked_in_order_and_see_answers_the_other_way_round(
    write_model: Any,
    make_server: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    order: tuple[type[First], ...],
) -> None:
    monkeypatch.setattr(builtins, "register_interceptors", hookimpl(lambda: list(order)), raising=False)
    write_model("m", CONFIG)
    outer, middle, inner = (kind.name for kind in order)
    asked = [f"{name} is asked" for name in (outer, middle, inner)]

    async def scenario() -> None:
        async with make_server() as server:
            x = np.zeros((1, 2), np.float32)
            First.events.clear()
            await server.infer_async("m", {"x": x})
            assert First.events == [*asked, *(f"{name} sees InferResponse" for name in (inner, middle, outer))]
            First.events.clear()
            with pytest.raises(InvalidArgument):  # behind all of them
                await server.infer_async("m", {"x": np.zeros((9, 2), np.float32)})
            assert First.events == [*asked, *(f"{name} sees InvalidArgument" for name in (inner, middle, outer))]
            First.events.clear()
            with pytest.raises(Unsupported, match=f"{middle} refuses"):
                await server.infer_async("m", {"x": x}, parameters={"refused_by": middle})
            assert First.events == [*asked[:2], f"{outer} sees Unsupported"]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_without_interceptors_a_request_is_started_by_nothing_else(make_server: Callable[..., Server]) -> None:
    engine: Engine = make_server().engine
    assert engine.entrance().start is start
    with pytest.raises(Unavailable):
        engine.entrance().find("m", "")


def test_the_principal_is_the_common_name_of_the_certificate() -> None:
    subject = ((("countryName", "FI"),), (("commonName", "alice"),))
    assert Caller("grpc", certificate={"subject": subject}).principal == "alice"
    assert Caller("grpc").principal == ""
