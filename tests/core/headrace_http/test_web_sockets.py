"""WebSocket routes on the native host, which has none, and of any ASGI server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar

import httpx
import pytest

from headrace import Extension, HttpCall, PermissionDenied, WebSocket, WebSocketRoute
from headrace_http.asgi import create_app
from headrace_http.frontend import HttpFrontend


class Echo(WebSocketRoute):
    name = "GET /echo"
    max_message_bytes = 10
    idle_timeout_s = 0.2
    ends: ClassVar[list[str]] = []

    async def converse(self, call: HttpCall, socket: WebSocket) -> None:
        if call.query:
            raise PermissionDenied("not you")
        await socket.accept(headers=[(b"X-Name", b"echo")])
        try:
            async for message in socket:
                if message == "fail":
                    raise PermissionDenied("no more")
                if message == "break":
                    raise ValueError
                if message == "end":
                    return
                await socket.send(message)
        finally:
            self.ends.append("ended")


class Silent(WebSocketRoute):
    name = "GET /silent"

    async def converse(self, call: HttpCall, socket: WebSocket) -> None:
        return


class Sockets(Extension):
    name = "sockets"
    adds = (Echo, Silent)


class Client:
    """The ASGI server's side of one socket."""

    def __init__(self, app: Any, path: str, query: bytes = b"", **scope: Any) -> None:
        self.sent: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self.to_app: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self.to_app.put_nowait({"type": "websocket.connect"})
        head: dict[str, Any] = {
            "type": "websocket",
            "path": path,
            "query_string": query,
            "headers": [],
            "http_version": "1.1",
        }
        head |= {"extensions": {"websocket.http.response": {}}, "subprotocols": []}
        self.task = asyncio.ensure_future(app(head | scope, self.to_app.get, self.sent.put))

    def say(self, **message: Any) -> None:
        self.to_app.put_nowait({"type": "websocket.receive", "bytes": None, "text": None} | message)

    async def next(self) -> MutableMapping[str, Any]:
        return await asyncio.wait_for(self.sent.get(), 10)


@pytest.fixture
def run(make_caller: Callable[..., Any]) -> Callable[..., Any]:
    """Runs ``scenario(app, engine)``."""

    def run(scenario: Callable[[Any, Any], Any]) -> None:
        async def main() -> None:
            engine = make_caller({}, http_address="127.0.0.1", http_port=0, exit_timeout_secs=1).engine
            engine.extension_parts = [*engine.extension_parts, Sockets]
            del engine.extensions
            Echo.ends.clear()
            await asyncio.wait_for(scenario(create_app(engine), engine), 30)

        asyncio.run(main())

    return run


def test_text_and_bytes_go_both_ways_until_the_route_ends(run: Callable[..., Any]) -> None:
    async def scenario(app: Any, engine: Any) -> None:
        client = Client(app, "/echo")
        accepted = await client.next()
        assert accepted == {"type": "websocket.accept", "subprotocol": None, "headers": [(b"x-name", b"echo")]}
        client.say(text="naïve")
        assert await client.next() == {"type": "websocket.send", "text": "naïve"}
        client.say(bytes=b"\0\xff")
        assert await client.next() == {"type": "websocket.send", "bytes": b"\0\xff"}
        client.say(text="end")
        assert await client.next() == {"type": "websocket.close", "code": 1000, "reason": ""}
        await client.task

    run(scenario)
    assert Echo.ends == ["ended"]


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        ({"text": "fail"}, 1008, "no more"),
        ({"text": "break"}, 1011, "the request failed inside the server; its log has the reason"),
        ({"text": "ä" * 6}, 1009, "a message may have at most 10 bytes"),
        ({"bytes": bytes(11)}, 1009, "a message may have at most 10 bytes"),
    ],
)
def test_close_frame_has_the_reason(run: Callable[..., Any], message: dict[str, Any], code: int, reason: str) -> None:
    async def scenario(app: Any, engine: Any) -> None:
        client = Client(app, "/echo")
        await client.next()
        client.say(**message)
        assert await client.next() == {"type": "websocket.close", "code": code, "reason": reason}
        await client.task

    run(scenario)
    assert Echo.ends == ["ended"]


def test_a_message_of_exactly_the_limit_passes(run: Callable[..., Any]) -> None:
    async def scenario(app: Any, engine: Any) -> None:
        client = Client(app, "/echo")
        await client.next()
        client.say(text="ä" * 5)
        assert (await client.next())["text"] == "ä" * 5
        client.task.cancel()

    run(scenario)


def test_silence_and_a_stop_end_a_socket(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(app: Any, engine: Any) -> None:
        client = Client(app, "/echo")
        await client.next()
        assert await client.next() == {"type": "websocket.close", "code": 1008, "reason": "no message in 0.2 s"}
        monkeypatch.setattr(Echo, "idle_timeout_s", 0)
        client = Client(app, "/echo")
        await client.next()
        await asyncio.sleep(0.3)
        engine.streams.end_all()
        assert await client.next() == {"type": "websocket.close", "code": 1001, "reason": "the server is stopping"}
        await client.task

    run(scenario)
    assert Echo.ends == ["ended"] * 2


def test_a_client_that_disconnects_cancels_the_route(run: Callable[..., Any]) -> None:
    async def scenario(app: Any, engine: Any) -> None:
        client = Client(app, "/echo")
        await client.next()
        client.to_app.put_nowait({"type": "websocket.disconnect", "code": 1006})
        await client.task
        assert client.sent.empty()
        assert not engine.streams._open

    run(scenario)
    assert Echo.ends == ["ended"]


def test_a_refusal_is_an_answer_of_http(run: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(app: Any, engine: Any) -> None:
        for path, query, status in (("/echo", b"a=b", 403), ("/nowhere", b"", 404), ("/silent", b"", 500)):
            client = Client(app, path, query)
            start, body = await client.next(), await client.next()
            assert (start["type"], start["status"]) == ("websocket.http.response.start", status)
            assert (b"content-length", b"%d" % len(body["body"])) in start["headers"]
        client = Client(app, "/echo", b"a=b", extensions=None)
        assert (await client.next())["type"] == "websocket.close"
        client = Client(app, "/echo", http_version="2")
        assert (await client.next())["status"] == 501

    run(scenario)
    assert "route 'GET /silent' has neither accepted nor refused" in caplog.text


def test_a_request_without_a_handshake_is_told_to_upgrade(run: Callable[..., Any]) -> None:
    async def scenario(app: Any, engine: Any) -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
            reply = await client.get("/echo")
        assert (reply.status_code, reply.headers["upgrade"]) == (426, "websocket")
        assert "GET /echo" in reply.json()["error"]

    run(scenario)


def test_the_native_host_names_the_host_that_can(run: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(app: Any, engine: Any) -> None:
        frontend = HttpFrontend(engine)
        caplog.clear()
        await frontend.start()
        sentence = "which this server's HTTP host can not serve: start it with --http-server=hypercorn"
        assert sentence in caplog.text, "said when it starts"
        async with httpx.AsyncClient() as client:
            upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
            for headers in ({}, upgrade):
                reply = await client.get(f"http://127.0.0.1:{frontend.port}/echo", headers=headers)
                assert reply.status_code == 501
                assert reply.json()["error"] == f"'GET /echo' is a WebSocket, {sentence}"
        await asyncio.wait_for(frontend.stop(), 10)

    caplog.set_level(logging.WARNING)
    run(scenario)


def test_a_route_that_is_no_socket_is_named() -> None:
    class Post(Echo):
        name = "POST /echo"

    class Nothing(WebSocketRoute):
        name = "GET /nothing"

    with pytest.raises(TypeError, match="route 'POST /echo' is a WebSocket, whose method is GET"):
        Post.check()
    with pytest.raises(TypeError, match="route 'GET /nothing' has no method 'converse'"):
        Nothing.check()
    Echo.check()
