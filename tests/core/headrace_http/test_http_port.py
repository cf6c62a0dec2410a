"""A second port on the code of the host: the one of docs/write-a-frontend.md, under the kit of frontends."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest

from headrace import (
    AnyOperation,
    Caller,
    ConfigError,
    ExtensionOperation,
    HttpCall,
    HttpHost,
    HttpPort,
    HttpReply,
    HttpRoute,
    ResourceExhausted,
)
from headrace.registry import FrontendRegistry, PluginInfo
from headrace_testing import FrontendConformance
from headrace_testing.frontend_models import Watching

PAGE = Path(__file__).parents[3] / "docs/write-a-frontend.md"


@pytest.fixture
def scores(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The plugin of the page, installed."""
    folder = tmp_path_factory.mktemp("scores")
    _, source = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "headrace_scores.py").write_text(source)
    info = folder / "headrace_scores-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-scores\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace]\nscores = headrace_scores\n")
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("headrace_scores")
    del sys.modules["headrace_scores"]


def answer(connection: socket.socket, method: str, path: str, body: bytes = b"") -> tuple[HTTPResponse, bytes]:
    """Return the answer to one request on an open connection, which stays open."""
    client = HTTPConnection("127.0.0.1")
    client.sock = connection
    client.request(method, path, body)
    reply = client.getresponse()
    client.sock = None
    return reply, reply.read()


class TestScores(FrontendConformance):
    plugin, frontend = "headrace_scores", "scores"
    http_server: ClassVar[str] = "native"

    @pytest.fixture(autouse=True)
    def installed(self, scores: ModuleType) -> None:
        pass

    def options(self, port: int) -> dict[str, Any]:
        group = sys.modules[self.plugin].ScoresOptions(enabled=True, address="127.0.0.1", port=port)
        return {"plugin_options": [group], "http_server": self.http_server, "http_max_input_size": 100_000}

    def infer(self, connection: socket.socket, model: str, x: Any) -> Any:
        tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
        reply, body = answer(connection, "POST", f"/score/{model}", json.dumps({"inputs": [tensor]}).encode())
        document = json.loads(body)
        if reply.status != 200:
            raise RuntimeError(document["error"])
        (output,) = document["outputs"]
        return np.array(output["data"], np.float32).reshape(output["shape"])

    def test_it_has_its_own_routes_and_no_others(self, served: Any) -> None:
        with served.connect() as connection:
            assert answer(connection, "GET", "/ping")[0].status == 200
            reply, body = answer(connection, "GET", "/v2/health/ready")
            assert (reply.status, json.loads(body)) == (404, {"error": "Not Found"})
            assert answer(connection, "POST", "/ping")[0].status == 405

    def test_it_has_the_limit_of_the_first_port(self, served: Any) -> None:
        with served.connect() as connection:
            reply, body = answer(connection, "POST", "/score/doubles", b" " * 100_001)
            assert (reply.status, "exceeds the maximum allowed input size of 100000" in body.decode()) == (400, True)

    def test_its_callers_are_admitted_before_the_body_is_parsed(
        self, served: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        admitted = []

        def admit(self: Watching, caller: Caller, operation: AnyOperation, model: str) -> None:
            admitted.append((caller.transport, str(operation), model))
            raise ResourceExhausted("later", retry_after_s=7)

        monkeypatch.setattr(Watching, "admit", admit)
        with served.connect() as connection:
            for method, path in (("GET", "/ping"), ("POST", "/score/nothing")):
                reply, _ = answer(connection, method, path, b"\0nonsense")
                assert (reply.status, reply.headers["Retry-After"]) == (429, "7")
        assert admitted == [("scores", "ready", ""), ("scores", "infer", "nothing")]


# ---------------------------------------------------------------------- what the page does not show


class Page(HttpRoute):
    name = "GET /page"
    operation = ExtensionOperation("page")

    async def answer(self, call: HttpCall) -> HttpReply:
        return HttpReply(200, (), (f"{self.extension.name} {call.caller.transport} {call.request.path}".encode(),))


class Rest(Page):
    name = "GET /*"


class Pages(HttpPort):
    name = "pages"
    routes = (Page,)
    otherwise = Rest
    enabled = True
    place = "127.0.0.1", 0
    max_body_bytes = 10
    path = "/from/options"

    def make_routes(self) -> list[HttpRoute]:
        return [*super().make_routes(), type("Chosen", (Page,), {"name": f"GET {self.path}"})(self)]


def test_other_paths_may_have_one_answer_and_bodies_their_own_limit(
    host: type[HttpHost], make_caller: Callable[..., Any]
) -> None:
    async def main() -> None:
        engine = make_caller({}, exit_timeout_secs=1).engine
        engine.host = lambda protocol: host
        port = Pages(engine)
        assert port.port == 0
        await port.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port.port}") as client:
                assert (await client.get("/page")).text == "pages pages /page"
                assert (await client.get("/any/thing")).text == "pages pages /any/thing"
                assert (await client.put("/any/thing", content=b"0123456789")).text == "pages pages /any/thing"
                assert (await client.put("/page")).status_code == 405
                assert (await client.put("/from/options")).status_code == 405
                headers = {"Inference-Header-Content-Length": "1"}
                reply = await client.post("/infer", content=b"0123456789a", headers=headers)
                assert (reply.status_code, "the maximum allowed input size of 10 bytes" in reply.text) == (400, True)
        finally:
            await asyncio.wait_for(port.stop(), 10)

    asyncio.run(main())


def test_a_path_of_the_options_that_is_none_ends_the_start(make_caller: Callable[..., Any]) -> None:
    port = Pages(make_caller({}).engine)
    port.path = "from/options"
    with pytest.raises(ConfigError, match=r"frontend 'pages': the path 'from/options' is not '/', words and"):
        port.answering(has_sockets=False)


def test_a_port_whose_routes_are_wrong_is_named_when_the_plugin_is_found() -> None:
    class Other(Page):
        name = "GET /{anything}"

    class Bad(Page):
        name = "FETCH /page"

    class Twice(Pages):
        routes: ClassVar[Any] = (Page, Other)

    class Wrong(Pages):
        otherwise: ClassVar[Any] = Bad

    registry = FrontendRegistry([])
    with pytest.raises(TypeError, match=r"one path fits both of the routes 'GET /page' and 'GET /{anything}'"):
        registry.add(Twice, PluginInfo("test", "test", "0"))
    with pytest.raises(TypeError, match="is named 'FETCH /page', not '<DELETE"):
        registry.add(Wrong, PluginInfo("test", "test", "0"))
    registry.add(Pages, PluginInfo("test", "test", "0"))
