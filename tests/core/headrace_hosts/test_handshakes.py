"""Handshakes of hostile peers, on sockets, with the clients of the standard library and of openssl."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.telemetry import log_limits
from headrace_hosts import handshakes
from headrace_hosts.accepting import Acceptor, accept
from headrace_hosts.listening import bind
from headrace_hosts.tls_connections import TlsConnection
from headrace_hosts.tls_files import TlsFiles
from tests.core.headrace_hosts.test_tls_files import client_of, pem

__all__ = ["pem"]


class Echo(asyncio.Protocol):
    """Echoes its bytes, and counts its pieces."""

    def __init__(self) -> None:
        self.pieces = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.pieces += 1
        self.transport.write(data)


class BufferedEcho(asyncio.BufferedProtocol):
    """The same with a buffer that is smaller than a record, and a pause after each piece."""

    def __init__(self) -> None:
        self.buffer = bytearray(1000)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.transport.write(self.buffer[:nbytes])
        self.transport.pause_reading()
        asyncio.get_running_loop().call_soon(self.transport.resume_reading)


@dataclass
class Serving:
    port: int
    made: list[asyncio.BaseProtocol]
    acceptor: Acceptor


@asynccontextmanager
async def serving(
    pem: Path,
    protocol: Callable[[], asyncio.BaseProtocol] = Echo,
    *,
    certificate: str = "a",
    root: str = "",
    handshake_s: float = 20,
) -> AsyncIterator[Serving]:
    """A port with TLS. ``root`` is the authority of clients."""
    listener = bind("127.0.0.1", 0, False)
    made: list[asyncio.BaseProtocol] = []

    def make() -> asyncio.BaseProtocol:
        made.append(protocol())
        return made[-1]

    files = TlsFiles(
        service="Echo",
        certificate=("--cert", str(pem / f"{certificate}.crt")),
        key=("--key", str(pem / f"{certificate}.key")),
        authorities=("--root", str(pem / f"{root}.crt") if root else ""),
        mutual=bool(root),
    )
    acceptor = await accept(make, listener, files, ("http/1.1",), handshake_s=handshake_s, no_tls=b"no TLS")
    try:
        yield Serving(listener.getsockname()[1], made, acceptor)
    finally:
        acceptor.close()
        for each in made:
            each.transport.abort()  # type: ignore[attr-defined]
        await asyncio.sleep(0)


def hello(pem: Path) -> bytes:
    """Return a ClientHello."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        client_of(pem).wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


@contextmanager
def connected(port: int, *sent: bytes, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), 20, (source, 0)) as connection:
        for data in sent:
            connection.sendall(data)
        connection.setblocking(False)
        yield connection


async def closed(connection: socket.socket) -> bool:
    """Wait until the server closes ``connection``. False if it first sends something."""
    try:
        return not await asyncio.get_running_loop().sock_recv(connection, 1)
    except ConnectionError:
        return True


# ------------------------------------------------------------------ handshakes


def test_a_turn_of_the_loop_does_one_step_and_networks_take_turns(pem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "_TURN_S", 0.0)
    steps: list[tuple[int, str]] = []
    turn = 0
    shake_hands = TlsConnection._shake_hands

    def counted(connection: TlsConnection) -> None:
        steps.append((turn, connection.address))
        shake_hands(connection)

    monkeypatch.setattr(TlsConnection, "_shake_hands", counted)

    async def scenario() -> None:
        nonlocal turn
        words = hello(pem)
        async with serving(pem) as server:
            flood = [connected(server.port, words) for _ in range(30)]
            connections = [each.__enter__() for each in flood]
            with connected(server.port, words, source="127.0.0.2") as other:
                while len(steps) < 31:
                    turn += 1
                    await asyncio.sleep(0)
                assert not await closed(other)
            for connection in connections:
                connection.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert len({turn for turn, _ in steps}) == len(steps)
    assert "127.0.0.2" in [address for _, address in steps[:4]]


def test_one_connection_too_many_closes_the_oldest_of_the_largest_network(
    pem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "PENDING", 8)

    async def scenario() -> None:
        async with serving(pem) as server:
            with connected(server.port, source="127.0.0.2") as other:
                await asyncio.sleep(0)
                flood = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(10)]
                for connection in flood:
                    connection.setblocking(False)
                assert [await closed(connection) for connection in flood[:3]] == [True] * 3
                with pytest.raises(BlockingIOError):
                    flood[3].recv(1)
                await asyncio.get_running_loop().sock_sendall(other, hello(pem))
                assert not await closed(other)
                for connection in flood:
                    connection.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"])
def test_a_handshake_that_takes_too_long_is_closed(pem: Path, sent: bytes) -> None:
    async def scenario() -> None:
        async with serving(pem, handshake_s=0.1) as server:
            with connected(server.port, sent) as slow:
                assert await closed(slow)

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\xff\xff" + bytes(70_000),  # a record that is too large
        b"\x16\x03\x01\x40\x00\x01\x01\x00\x00" + bytes(16380),  # a ClientHello of 64 KiB, and only its beginning
        b"\x80\x2e\x01\x03\x01" + bytes(50),  # SSL 2.0
        b"\0" * 300,
    ],
)
def test_rubbish_opens_nothing(pem: Path, sent: bytes) -> None:
    async def scenario() -> None:
        async with serving(pem, handshake_s=0.2) as server:
            with connected(server.port, sent) as rubbish:
                while not await closed(rubbish):
                    pass  # an alert
            assert server.made == []

    asyncio.run(asyncio.wait_for(scenario(), 20))


def can_use(group: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ecdh_curve(group)
    except (ValueError, ssl.SSLError):
        return False
    return True


@pytest.mark.parametrize(
    ("groups", "agreed"),
    [("X25519", "X25519"), ("P-256", "prime256v1"), ("P-384", "secp384r1"), ("ffdhe8192:X25519", "X25519"),
     ("ffdhe8192", ""), ("ffdhe2048", "")],
)  # fmt: skip
def test_key_exchanges_that_compute_long_are_refused(pem: Path, groups: str, agreed: str) -> None:
    """With ffdhe8192, one client makes the server compute for 0.1 s."""
    if agreed == "X25519" and not can_use(agreed):
        pytest.skip("this Python cannot choose X25519: its clients agree on P-256")
    openssl = shutil.which("openssl")
    assert openssl is not None

    def client(port: int) -> str:
        command = [openssl, "s_client", "-connect", f"127.0.0.1:{port}", "-groups", groups]
        return subprocess.run(command, input="", capture_output=True, text=True, check=False, timeout=20).stdout

    async def scenario() -> str:
        async with serving(pem) as server:
            return await asyncio.to_thread(client, server.port)

    report = asyncio.run(scenario())
    assert (f", {agreed}," in report or f": {agreed}," in report) if agreed else "Cipher is (NONE)" in report


def test_refused_clients_are_in_the_audit_log_and_a_flood_of_them_is_counted(
    pem: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        log_limits.flush()  # what the tests before have used up
        async with serving(pem) as server:
            for sent in (b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x00\x05hello"):
                for _ in range(30):
                    with connected(server.port, sent) as peer:
                        await closed(peer)
        log_limits.flush()

    with caplog.at_level(logging.INFO, "headrace.audit"):
        asyncio.run(asyncio.wait_for(scenario(), 20))
    lines = [each.getMessage() for each in caplog.records if each.name.startswith("headrace.audit.tls")]
    assert lines[0] == "a client at 127.0.0.1 is refused: it does not speak TLS"
    assert len(lines) == 2 * 11
    assert sum(line.startswith("a TLS handshake with 127.0.0.1 failed: ") for line in lines) == 10
    assert [line for line in lines if line.startswith("20 more lines like this were left out: ")] == lines[-2:]
