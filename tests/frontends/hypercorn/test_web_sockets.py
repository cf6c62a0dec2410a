"""WebSocket routes on hypercorn, by the client of the package websockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket as sockets
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import headrace
from headrace import (
    AnyOperation,
    Caller,
    Extension,
    ExtensionOperation,
    HttpCall,
    Interceptor,
    Outcome,
    PermissionDenied,
    ResourceExhausted,
    Server,
    Unauthenticated,
    Watch,
    WebSocket,
    WebSocketRoute,
    hookimpl,
)
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace_testing.serving import serve
from tests.core.headrace_hosts.test_tls_files import pem
from tests.core.headrace_http.test_tls import files

__all__ = ["pem"]
_DIALOGUE = ExtensionOperation("dialogue")


class Echo(WebSocketRoute):
    name = "GET /rooms/{name}/echo"
    operation = _DIALOGUE
    max_message_bytes = 200_000

    async def converse(self, call: HttpCall, socket: WebSocket) -> None:
        await socket.accept("b" if "b" in socket.subprotocols else "")
        try:
            async for message in socket:
                Sockets.received += 1
                await Sockets.may.wait()
                await socket.send(message)
        finally:
            Sockets.ended += 1


class Flood(WebSocketRoute):
    name = "GET /flood"

    async def converse(self, call: HttpCall, socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                await socket.send(bytes(100_000))
                Sockets.flooded += 1
        finally:
            Sockets.ended += 1


class Sockets(Extension):
    name = "sockets"
    adds = (Echo, Flood)
    may: ClassVar[asyncio.Event]
    received: ClassVar[int]
    ended: ClassVar[int]
    flooded: ClassVar[int]

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        Sockets.may = asyncio.Event()
        Sockets.may.set()
        Sockets.received = Sockets.ended = Sockets.flooded = 0


class Guard(Interceptor):
    name = "guard"
    asked: ClassVar[list[tuple[str, str, str]]] = []
    outcomes: ClassVar[list[str]] = []

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Any:
        if operation != _DIALOGUE:
            return None
        if model != "ok":
            self.asked.append((caller.transport, caller.peer, model))
            raise {
                "a": Unauthenticated("who", challenge="Basic"),
                "f": PermissionDenied("no"),
                "r": ResourceExhausted("later", retry_after_s=3),
            }[model]
        return Ends()


class Ends(Watch):
    def ended(self, outcome: Outcome) -> None:
        Guard.outcomes.append(str(outcome.error))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def send_much(client: Any, times: int) -> None:
    for _ in range(times):
        client.send(bytes(200_000))


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Yields a server with the sockets, and its URL."""

    @contextmanager
    def start(*interceptors: type[Interceptor], **options: Any) -> Iterator[tuple[Server, str]]:
        plugin, discover = ModuleType("test"), Plugins.discover
        plugin.register_extensions = hookimpl(lambda: [Sockets])  # type: ignore[attr-defined]
        plugin.register_interceptors = hookimpl(lambda: list(interceptors))  # type: ignore[attr-defined]

        def more(allow: Any = None) -> Plugins:
            plugins = discover(["hypercorn"])
            plugins._add(PluginInfo("test", "test", "0"), lambda: plugin)
            return plugins

        with monkeypatch.context() as patch:
            patch.setattr(Plugins, "discover", more)
            options = {"http_server": "hypercorn", "allow_grpc": False, "exit_timeout_secs": 5, **options}
            with serve(tmp_path, listen=True, **options) as server:
                yield server, f"ws://127.0.0.1:{server.options.http_port}"

    return start


def test_messages_of_all_sizes_go_both_ways(serving: Callable[..., Any]) -> None:
    offered: Any = ["a", "b"]
    with serving() as (_, url), connect(f"{url}/rooms/one/echo", subprotocols=offered) as client:
        assert client.subprotocol == "b"
        assert client.response is not None
        assert "Sec-WebSocket-Extensions" not in client.response.headers, "a client could make it inflate anything"
        for message in ("", "naïve", b"", b"\0\xff", "x" * 130, bytes(70_000), "y" * 200_000):
            client.send(message)
            assert client.recv(10) == message
        client.send(["in ", "three ", "pieces"])
        assert client.recv(10) == "in three pieces"
        client.ping().wait(10)
        assert httpx.get(f"http{url[2:]}/v2/health/live").status_code == 200
    until(lambda: Sockets.ended == 1)


@pytest.mark.parametrize("message", [bytes(200_001), "ä" * 100_001, [bytes(100_000)] * 3])
def test_a_message_that_is_too_large_closes_the_socket(serving: Callable[..., Any], message: Any) -> None:
    with serving() as (_, url), connect(f"{url}/rooms/one/echo") as client:
        client.send("before")
        assert client.recv(10) == "before"
        with suppress(ConnectionClosed):
            client.send(message)
        with pytest.raises(ConnectionClosed):
            client.recv(10)
        assert client.close_code == 1009
        assert client.close_reason == "a message may have at most 200000 bytes"
        until(lambda: Sockets.ended == 1)
        assert Sockets.received == 1


def test_interceptors_refuse_before_the_socket_is_accepted(serving: Callable[..., Any]) -> None:
    Guard.asked.clear()
    with serving(Guard) as (_, url):
        for room, status, header in (("a", 401, "WWW-Authenticate"), ("f", 403, ""), ("r", 429, "Retry-After")):
            with pytest.raises(InvalidStatus) as refused, connect(f"{url}/rooms/{room}/echo"):
                pass
            assert refused.value.response.status_code == status
            assert b'{"error":' in (refused.value.response.body or b"")
            assert not header or header in refused.value.response.headers
        assert Guard.asked == [("http", "127.0.0.1", room) for room in "afr"]
        assert Sockets.received == Sockets.ended == 0
        Guard.outcomes.clear()
        with connect(f"{url}/rooms/ok/echo") as client:
            client.send("x")
            assert client.recv(10) == "x"
            assert Guard.outcomes == []
        until(lambda: Guard.outcomes == ["the caller has disconnected"])


def test_a_client_that_disconnects_cancels_the_route(serving: Callable[..., Any]) -> None:
    with serving() as (server, url):
        with connect(f"{url}/rooms/one/echo") as client:
            server.loop.call_soon_threadsafe(Sockets.may.clear)
            client.send("never answered")
            until(lambda: Sockets.received == 1)
            client.socket.shutdown(sockets.SHUT_RDWR)
        until(lambda: Sockets.ended == 1)
        with connect(f"{url}/flood") as client:
            client.recv(10)
            client.socket.shutdown(sockets.SHUT_RDWR)
        until(lambda: Sockets.ended == 2)


def test_neither_side_holds_more_than_the_other_takes(serving: Callable[..., Any]) -> None:
    with serving(http_min_data_rate=0) as (server, url):
        with connect(f"{url}/flood", max_queue=1) as client:
            client.recv(10)
            time.sleep(0.5)
            before = Sockets.flooded
            time.sleep(0.5)
            assert Sockets.flooded == before < 200, "a client that does not read stops the route"
            for _ in range(before):
                client.recv(10)
        with connect(f"{url}/rooms/one/echo") as client:
            server.loop.call_soon_threadsafe(Sockets.may.clear)
            client.socket.settimeout(1)
            with pytest.raises((TimeoutError, ConnectionClosed)):
                send_much(client, 500)  # 100 MB
            assert Sockets.received == 1
            server.loop.call_soon_threadsafe(Sockets.may.set)


def test_a_server_that_stops_closes_its_sockets(serving: Callable[..., Any]) -> None:
    with ExitStack() as clients:
        with serving(exit_timeout_secs=4) as (_, url):
            client = clients.enter_context(connect(f"{url}/rooms/one/echo"))
            client.send("x")
            client.recv(10)
        with pytest.raises(ConnectionClosed):
            client.recv(10)
    assert (client.close_code, client.close_reason) == (1001, "the server is stopping")
    assert Sockets.ended == 1


def test_only_paths_with_a_socket_are_upgraded(serving: Callable[..., Any]) -> None:
    with serving() as (_, url):
        with pytest.raises(InvalidStatus) as refused, connect(f"{url}/v2/health/live"):
            pass
        assert refused.value.response.status_code == 200
        half = {"Connection": "Upgrade", "Upgrade": "websocket"}  # without version and key
        for headers in ({}, half, half | {"Sec-WebSocket-Version": "8", "Sec-WebSocket-Key": "x"}):
            reply = httpx.get(f"http{url[2:]}/rooms/one/echo", headers=headers)
            assert (reply.status_code, reply.headers["upgrade"]) == (426, "websocket")


def test_a_client_that_takes_nothing_is_disconnected(serving: Callable[..., Any]) -> None:
    limits = {"http_min_data_rate": 1000, "http_stall_timeout_secs": 1}
    with serving(**limits) as (_, url), connect(f"{url}/flood", max_queue=1):
        until(lambda: Sockets.ended == 1)


def test_a_client_that_takes_steadily_is_not_slow(serving: Callable[..., Any]) -> None:
    limits = {"http_min_data_rate": 1000, "http_stall_timeout_secs": 1}
    with serving(**limits) as (_, url), connect(f"{url}/flood", max_queue=1) as client:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            assert len(client.recv(10)) == 100_000
            time.sleep(0.02)  # there is always something unsent
    until(lambda: Sockets.ended == 1)


def test_a_quiet_socket_lives_longer_than_an_idle_connection(serving: Callable[..., Any]) -> None:
    limits = {"http_keepalive_timeout_secs": 1, "http_header_timeout_secs": 1, "http_stall_timeout_secs": 1}
    with serving(**limits) as (_, url), connect(f"{url}/rooms/one/echo") as client:
        for _ in range(2):
            time.sleep(2.5)
            client.send("x")
            assert client.recv(10) == "x"


def test_the_example_of_the_docs_answers(serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/write-an-extension.md").read_text()
    (source,) = re.findall(r"```\n(class Dialogue\(.*?)```", page, re.DOTALL)
    module: dict[str, Any] = {"json": json, "np": np}
    module |= {name: getattr(headrace, name) for name in re.findall(r"\b[A-Z]\w+", source) if name in headrace.__all__}
    exec(compile(source, "docs/write-an-extension.md", "exec"), module)
    monkeypatch.setattr(Sockets, "adds", (module["Dialogue"],))
    with serving() as (_, url), connect(f"{url}/v2/models/nothing/dialogue") as client:
        for message, error in (("no", "a message is a JSON object"), ("{}", "Request for unknown model: 'nothing'")):
            client.send(message)
            assert error in json.loads(client.recv(10))["error"]


def test_sockets_have_the_tls_of_the_host(serving: Callable[..., Any], pem: Path) -> None:
    trusted = ssl.create_default_context(cafile=str(pem / "a.crt"))
    with serving(**files(pem)) as (server, _):
        url = f"wss://localhost:{server.options.http_port}/rooms/one/echo"
        with connect(url, ssl=trusted) as client:
            client.send("over tls")
            assert client.recv(10) == "over tls"
        until(lambda: Sockets.ended == 1)
