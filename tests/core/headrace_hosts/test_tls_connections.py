"""The transport of TLS: bytes in both directions, its end, and records of hostile peers."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop

from headrace_hosts.handshakes import HandshakeQueue
from tests.core.headrace_hosts.test_handshakes import BufferedEcho, Echo, connected, serving
from tests.core.headrace_hosts.test_tls_files import client_of, pem

__all__ = ["pem"]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    loop: asyncio.AbstractEventLoop = request.param()
    yield loop
    loop.run_until_complete(asyncio.sleep(0))  # an aborted connection is closed
    loop.close()


@pytest.mark.parametrize("protocol", [Echo, BufferedEcho])
@pytest.mark.parametrize("certificate", ["a", "ec"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_all_bytes_arrive_in_both_directions(
    loop: asyncio.AbstractEventLoop,
    pem: Path,
    protocol: type[asyncio.BaseProtocol],
    certificate: str,
    version: ssl.TLSVersion,
) -> None:
    sent = bytes(range(256)) * 2000
    client = client_of(pem)
    client.load_verify_locations(pem / "ec.crt")
    client.minimum_version = client.maximum_version = version

    async def scenario() -> None:
        async with serving(pem, protocol, certificate=certificate) as server:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=client, server_hostname="localhost"
            )
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            writer.close()
            await writer.wait_closed()

    loop.run_until_complete(asyncio.wait_for(scenario(), 20))


def test_a_close_sends_everything_and_the_end_of_tls(loop: asyncio.AbstractEventLoop, pem: Path) -> None:
    class Speech(Echo):
        def data_received(self, data: bytes) -> None:
            self.transport.write(bytes(3_000_000))
            self.transport.close()

    def client(port: int) -> int:
        with (
            socket.create_connection(("127.0.0.1", port), 20) as plain,
            client_of(pem).wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False) as secure,
        ):
            secure.sendall(b"x" * 40_000)  # more than the server reads before it closes
            return sum(len(piece) for piece in iter(lambda: secure.recv(65536), b""))

    async def scenario() -> None:
        async with serving(pem, Speech) as server:
            assert await asyncio.to_thread(client, server.port) == 3_000_000

    loop.run_until_complete(asyncio.wait_for(scenario(), 20))


def test_a_client_whose_certificate_is_refused_is_logged(pem: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with serving(pem, root="b") as server:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=client_of(pem, "ec"), server_hostname="localhost"
            )
            with suppress(ssl.SSLError, ConnectionError):
                assert await reader.read(1) == b""
            writer.close()
            with suppress(ssl.SSLError, ConnectionError):
                await writer.wait_closed()
            assert server.made == []

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert "the certificate of a client at 127.0.0.1 is refused: self-signed certificate" in caplog.text


def test_a_peer_that_sends_records_of_one_byte_waits_and_loses_none(pem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 records take 30 ms of the loop in one piece."""
    many = 20_000
    costs: list[float] = []
    delay = HandshakeQueue.delay

    def counted(queue: HandshakeQueue, cost_s: float, read: Callable[[], None]) -> None:
        costs.append(cost_s)
        delay(queue, cost_s, read)

    monkeypatch.setattr(HandshakeQueue, "delay", counted)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with serving(pem) as server:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = client_of(pem).wrap_bio(incoming, outgoing, server_hostname="localhost")
            with connected(server.port) as plain:
                while True:
                    try:
                        client.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        await loop.sock_sendall(plain, outgoing.read())
                        incoming.write(await loop.sock_recv(plain, 65536))
                for _ in range(many):
                    client.write(b"x")
                sending = loop.create_task(loop.sock_sendall(plain, outgoing.read()))
                got = 0
                while got < many:
                    incoming.write(await loop.sock_recv(plain, 65536))
                    try:
                        while True:
                            got += len(client.read(65536))
                    except ssl.SSLWantReadError:
                        pass
                await sending

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert len(costs) > many * 23 / 16384 - 3  # a read is 16 KiB, and the first two are free
