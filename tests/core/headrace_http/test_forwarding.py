"""A port whose paths forward to those of KServe v2, under the kit of frontends."""

from __future__ import annotations

import importlib
import json
import socket
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace import (
    AnyOperation,
    Caller,
    Forwarded,
    ForwardingPort,
    HeadraceError,
    HttpReply,
    HttpRequest,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from headrace_http.forwarding import _Forwarding
from headrace_http.message import Cancel, Reply, error_reply
from headrace_testing import FrontendConformance
from headrace_testing.frontend_models import Watching

SOURCE = """
from dataclasses import dataclass
from typing import ClassVar

from headrace import (
    Forwarded, ForwardingPort, HttpReply, HttpRoute, InvalidArgument, Operation, OptionGroup, hookimpl
)

@dataclass(frozen=True)
class DoorsOptions(OptionGroup):
    name: ClassVar[str] = "doors"
    enabled: bool = False
    port: int = 0

class Own(HttpRoute):
    name = "GET /own"
    operation = Operation.INDEX

    async def answer(self, call):
        return HttpReply(200, [], [b"mine"])

def mark(reply):
    return HttpReply(reply.status, [*reply.headers, (b"Door", b"front")], reply.parts)

class Doors(ForwardingPort):
    name = "doors"
    routes = (Own,)

    @property
    def enabled(self):
        return self.engine.options.group(DoorsOptions).enabled

    @property
    def place(self):
        return "127.0.0.1", self.engine.options.group(DoorsOptions).port

    def forward(self, request):
        head, _, rest = request.path[1:].partition("/")
        if head == "own":
            return None
        if head == "wrong":
            raise InvalidArgument("no such door")
        if head == "metrics":
            return Forwarded(request)
        if head == "ask":
            return Forwarded(request._replace(path=f"/v2/models/{rest}/infer"), mark)
        if head == "either":
            first, second = (Forwarded(request._replace(path=f"/v2/models/{each}/infer")) for each in rest.split("/"))
            return first._replace(change=mark, otherwise=second)
        return HttpReply(418)

@hookimpl
def add_options():
    return [DoorsOptions]

@hookimpl
def register_frontends():
    return [Doors]
"""


@pytest.fixture
def doors(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The plugin, installed."""
    folder = tmp_path_factory.mktemp("doors")
    (folder / "headrace_doors.py").write_text(SOURCE)
    info = folder / "headrace_doors-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-doors\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace]\ndoors = headrace_doors\n")
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("headrace_doors")
    del sys.modules["headrace_doors"]


def answer(connection: socket.socket, method: str, path: str, body: bytes = b"") -> tuple[HTTPResponse, bytes]:
    """Return the answer to one request on an open connection, which stays open."""
    client = HTTPConnection("127.0.0.1")
    client.sock = connection
    client.request(method, path, body)
    reply = client.getresponse()
    client.sock = None
    return reply, reply.read()


class TestDoors(FrontendConformance):
    plugin, frontend = "headrace_doors", "doors"

    @pytest.fixture(autouse=True)
    def installed(self, doors: ModuleType) -> None:
        pass

    def options(self, port: int) -> dict[str, Any]:
        group = sys.modules[self.plugin].DoorsOptions(enabled=True, port=port)
        return {"plugin_options": [group], "http_max_input_size": 100_000, "metrics_port": 0}

    def infer(self, connection: socket.socket, model: str, x: Any) -> Any:
        tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
        reply, body = answer(connection, "POST", f"/ask/{model}", json.dumps({"inputs": [tensor]}).encode())
        document = json.loads(body)
        assert reply.headers["Door"] == "front"
        if reply.status != 200:
            raise RuntimeError(document["error"])
        (output,) = document["outputs"]
        return np.array(output["data"], np.float32).reshape(output["shape"])

    def test_each_path_is_answered_by_what_forward_returns(self, served: Any) -> None:
        with served.connect() as connection:
            assert answer(connection, "GET", "/own")[1] == b"mine"
            assert answer(connection, "GET", "/anything")[0].status == 418
            reply, body = answer(connection, "POST", "/wrong", b"x")
            assert (reply.status, json.loads(body)) == (400, {"error": "no such door"})
            reply, body = answer(connection, "GET", "/ask/doubles")
            assert (reply.status, json.loads(body)) == (405, {"error": "Method Not Allowed"})
            assert answer(connection, "GET", "/metrics")[0].status == 404  # the kit's server has no metrics

    def test_the_limit_of_a_body_is_that_of_the_path_that_answers(self, served: Any) -> None:
        with served.connect() as connection:
            reply, body = answer(connection, "POST", "/ask/doubles", b" " * 100_001)
            assert (reply.status, "exceeds the maximum allowed input size of 100000" in body.decode()) == (400, True)
        x = np.arange(30_000, dtype=np.float32)
        head = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 30_000],
                            "parameters": {"binary_data_size": x.nbytes}}]}  # fmt: skip
        text = json.dumps(head).encode()
        with served.connect() as connection:
            client = HTTPConnection("127.0.0.1")
            client.sock = connection
            client.request("POST", "/ask/doubles", text + x.tobytes(),
                           {"Inference-Header-Content-Length": str(len(text))})  # fmt: skip
            assert b"exceeds" not in client.getresponse().read()
            client.sock = None

    @pytest.mark.parametrize("waits", [False, True])
    def test_a_caller_who_may_not_use_one_model_is_answered_by_the_other(
        self, served: Any, monkeypatch: pytest.MonkeyPatch, waits: bool
    ) -> None:
        errors: list[type[HeadraceError]] = []

        async def refuse_later() -> None:
            raise errors[0]("not you")

        def admit(self: Watching, caller: Caller, operation: AnyOperation, model: str) -> Any:
            if model != "secret":
                return None
            if waits:
                return refuse_later()
            raise errors[0]("not you")

        monkeypatch.setattr(Watching, "admit", admit)
        body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}]}'
        # A missing model is another error than a refusal, and no reason to forward to the other one.
        cases = {PermissionDenied: 200, Unauthenticated: 200, ResourceExhausted: 429}
        with served.connect() as connection:
            for error, status in cases.items():
                errors[:] = [error]
                reply, _ = answer(connection, "POST", "/either/secret/doubles", body)
                assert (reply.status, reply.headers["Door"]) == (status, None if status == 200 else "front")
            assert answer(connection, "POST", "/either/absent/doubles", body)[0].status == 404
            assert answer(connection, "POST", "/either/secret/absent", body)[0].headers["Door"] == "front"
            errors[:] = [PermissionDenied]
            assert answer(connection, "POST", "/either/secret/absent", body)[0].status == 404

    def test_its_callers_are_admitted_as_those_of_the_first_port(
        self, served: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        admitted = []

        def admit(self: Watching, caller: Caller, operation: AnyOperation, model: str) -> None:
            admitted.append((caller.transport, str(operation), model))
            raise ResourceExhausted("later")

        monkeypatch.setattr(Watching, "admit", admit)
        with served.connect() as connection:
            for method, path in (("POST", "/ask/doubles"), ("GET", "/own")):
                assert answer(connection, method, path, b"\0nonsense" if method == "POST" else b"")[0].status == 429
        assert [(transport, model) for transport, _, model in admitted] == [("http", "doubles"), ("http", "")]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_caller_who_leaves_cancels_the_request_that_is_being_answered(is_late: bool) -> None:
    cancelled: list[str] = []
    replies: list[Reply] = []

    def first(request: HttpRequest, reply: Reply) -> Cancel:
        replies.append(reply)
        if request.path == "/secret" and not is_late:
            reply(error_reply(PermissionDenied("not you")))
        return lambda: cancelled.append(request.path)

    forwarded = HttpRequest("POST", "/secret", {}, memoryview(b""))
    port = SimpleNamespace(
        forward=lambda request: Forwarded(forwarded, otherwise=Forwarded(forwarded._replace(path="/own")))
    )
    answers: list[HttpReply] = []
    leave = _Forwarding(cast("ForwardingPort", port), first, first, first)(forwarded, answers.append)
    assert leave is not None
    if is_late:
        replies[0](error_reply(PermissionDenied("not you")))
    leave()
    leave()
    assert (cancelled, answers) == (["/own"], [])
