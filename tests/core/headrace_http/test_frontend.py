"""A host on real sockets: the native one, and hosts of plugins, whose tests import these."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from headrace.errors import Unavailable
from headrace_http.http_host import HttpHost

MakeCaller = Callable[..., Any]
Host = type[HttpHost]
X = {"X": ("UINT8", (-1,))}


@asynccontextmanager
async def serving(host: Host, caller: Any) -> AsyncIterator[HttpHost]:
    frontend = host(caller.engine)
    await frontend.start()
    try:
        yield frontend
    finally:
        await asyncio.wait_for(frontend.stop(), 10)


def options(**rest: Any) -> dict[str, Any]:
    return {"http_address": "127.0.0.1", "http_port": 0, "exit_timeout_secs": 1, **rest}


def test_hosts_answer_alike(make_caller: MakeCaller, host: Host) -> None:
    text = json.dumps(
        {
            "inputs": [
                {"name": "X", "datatype": "UINT8", "shape": [3_000_000], "parameters": {"binary_data_size": 3_000_000}}
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    data = bytes(range(250)) * 12_000

    async def main() -> None:
        async with (
            serving(host, make_caller(X, **options())) as frontend,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.port}") as client,
        ):
            assert (await client.get("/v2/health/ready")).status_code == 200
            assert (await client.get("/nowhere")).json() == {"error": "Not Found"}
            assert (await client.put("/v2")).status_code == 405
            headers = {"Inference-Header-Content-Length": str(len(text)), "Accept-Encoding": "identity"}
            reply = await client.post("/v2/models/echo/infer", content=text + data, headers=headers)
            assert reply.status_code == 200, reply.text
            assert reply.content.endswith(data)
            length = int(reply.headers["Inference-Header-Content-Length"])
            assert len(reply.content) == length + len(data)
            head = await client.head("/v2")
            assert (head.status_code, head.content) == (405, b"")

    asyncio.run(main())


def test_oversize_body_is_refused_and_the_server_goes_on(make_caller: MakeCaller, host: Host) -> None:
    async def main() -> None:
        caller = make_caller(X, **options(http_max_input_size=1000))
        async with (
            serving(host, caller) as frontend,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.port}") as client,
        ):
            reply = await client.post("/v2/models/echo/infer", content=b"x" * 200_000)
            assert reply.status_code == 400
            assert "request JSON size of 200000 bytes exceeds" in reply.json()["error"]
            assert (await client.get("/v2/health/live")).status_code == 200

    asyncio.run(main())


def test_disconnect_cancels_the_request(make_caller: MakeCaller, host: Host) -> None:
    async def main() -> None:
        caller = make_caller(X, **options())
        caller.model.holds = True
        submitted, cancelled = asyncio.Event(), asyncio.Event()
        keep = caller.model.enqueue

        def submit(request: Any) -> None:
            keep(request)
            request.on_cancel = lambda gone: cancelled.set()
            submitted.set()

        caller.model.enqueue = submit
        caller.table.serve(caller.model)
        async with serving(host, caller) as frontend:
            body = b'{"inputs":[{"name":"X","datatype":"UINT8","shape":[1],"data":[1]}]}'
            _, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
            writer.write(
                b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            await asyncio.wait_for(submitted.wait(), 5)
            writer.transport.abort()
            await asyncio.wait_for(cancelled.wait(), 5)
            assert caller.model.tickets[0].cancelled

    asyncio.run(main())


def test_stopping_answers_what_is_in_flight(make_caller: MakeCaller, host: Host) -> None:
    async def main() -> None:
        caller = make_caller(X, **options())
        caller.model.holds = True
        submitted = asyncio.Event()
        keep = caller.model.enqueue

        def submit(request: Any) -> None:
            keep(request)
            submitted.set()

        caller.model.enqueue = submit
        caller.table.serve(caller.model)
        async with serving(host, caller) as frontend, httpx.AsyncClient() as client:
            body = {"inputs": [{"name": "X", "datatype": "UINT8", "shape": [1], "data": [1]}]}
            url = f"http://127.0.0.1:{frontend.port}/v2/models/echo/infer"
            asking = asyncio.ensure_future(client.post(url, json=body))
            await asyncio.wait_for(submitted.wait(), 5)
            stopping = asyncio.ensure_future(frontend.stop())
            await asyncio.sleep(0)
            caller.model.answer(caller.model.tickets[0])
            assert (await asking).status_code == 200
            await asyncio.wait_for(stopping, 5)

    asyncio.run(main())


def test_repeated_request_is_answered_with_its_own_tensors(make_caller: MakeCaller, host: Host) -> None:
    """Over two connections, in turn: head and body in one write, or in two."""
    entry = {"name": "X", "datatype": "UINT8", "shape": [5], "parameters": {"binary_data_size": 5}}
    text = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    head = (
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n"
        b"Inference-Header-Content-Length: %d\r\n\r\n" % (len(text) + 5, len(text))
    )

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *writes: bytes) -> bytes:
        for data in writes:
            writer.write(data)
            await asyncio.sleep(0.01)  # so that each is a read of its own; the answer is the same if not
        reply = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert reply.startswith(b"HTTP/1.1 200")
        (length,) = [line for line in reply.lower().split(b"\r\n") if line.startswith(b"content-length")]
        return await asyncio.wait_for(reader.readexactly(int(length.split(b":")[1])), 5)

    async def main() -> None:
        async with serving(host, make_caller(X, **options())) as frontend:
            peers = [await asyncio.open_connection("127.0.0.1", frontend.port) for _ in range(2)]
            for number in range(12):
                data = b"body%d" % (number % 10)
                writes = (head, text + data) if number % 3 else (head + text + data,)
                assert (await ask(*peers[number % 2], *writes)).endswith(data)
            for _, writer in peers:
                writer.close()

    asyncio.run(main())


def test_busy_port_is_named(make_caller: MakeCaller, host: Host) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            frontend = host(make_caller(X, **options(http_port=port)).engine)
            with pytest.raises(Unavailable, match=f"127.0.0.1:{port}: the port is in use"):
                await frontend.start()

    asyncio.run(main())


def test_start_is_logged_in_tritons_words(
    make_caller: MakeCaller, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> int:
        async with serving(host, make_caller(X, **options())) as frontend:
            return frontend.port

    caplog.set_level(logging.INFO)
    port = asyncio.run(main())
    assert f"Started HTTPService at 127.0.0.1:{port}" in caplog.messages


def test_two_servers_may_share_a_port(make_caller: MakeCaller, host: Host) -> None:
    async def main() -> None:
        async with serving(host, make_caller(X, **options(reuse_http_port=True))) as first:
            shared = options(reuse_http_port=True, http_port=first.port)
            async with serving(host, make_caller(X, **shared)) as second:
                assert second.port == first.port

    asyncio.run(main())
