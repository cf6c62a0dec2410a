"""TLS of the HTTP port, by the stock client and by the standard library, with certificates of openssl."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tritonclient.http as stock

from headrace import AnyOperation, Caller, ConfigError, Interceptor, Server, builtins, hookimpl
from tests.core.conftest import gated, make_server, repository, write_model
from tests.core.headrace_hosts.test_tls_files import client_of, pem

__all__ = ["gated", "make_server", "pem", "repository", "write_model"]

CONFIG = """
backend: "identity"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
Serve = Callable[..., None]


class Witness(Interceptor):
    """Records the callers."""

    name: ClassVar[str] = "witness"
    seen: ClassVar[list[tuple[str, str, bool]]] = []

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        self.seen.append((caller.transport, caller.principal, caller.certificate is not None))


def files(pem: Path, certificate: str = "a.crt", key: str = "a.key", client_ca: str = "") -> dict[str, Any]:
    """Return the options of TLS. With ``client_ca``, clients need a certificate."""
    named = {"http_server_cert": certificate, "http_server_key": key, "http_root_cert": client_ca}
    paths = {option: str(pem / name) if name else "" for option, name in named.items()}
    return {"http_use_ssl": True, "http_use_ssl_mutual": bool(client_ca), **paths}


def trusting(pem: Path, identity: str = "") -> ssl.SSLContext:
    """Return the context of a client of HTTP/1.1."""
    context = client_of(pem, identity)
    context.set_alpn_protocols(["http/1.1"])
    return context


@pytest.fixture
def http_server() -> str:
    """The host. The tests of plugins have their own."""
    return "native"


@pytest.fixture
def serve(
    write_model: Any, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, http_server: str
) -> Serve:
    """Runs ``scenario(port, metrics port)`` on a thread, against a server with the options."""
    monkeypatch.setattr(builtins, "register_interceptors", hookimpl(lambda: [Witness]), raising=False)
    monkeypatch.setattr(Witness, "seen", [])

    def run(options: dict[str, Any], scenario: Callable[[int, int], None] | None = None) -> None:
        write_model("m", CONFIG)

        async def main() -> None:
            ports = {"http_server": http_server, "http_address": "127.0.0.1", "http_port": 0, "metrics_port": 0}
            async with make_server(**ports, allow_grpc=False, exit_timeout_secs=5, **options) as server:
                await server.start_frontends()
                if scenario is not None:
                    found = {each.name: each.port for each in server.frontends}  # type: ignore[attr-defined]
                    metrics = found.pop("metrics")
                    (first,) = found.values()
                    await asyncio.to_thread(scenario, first, metrics)

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


def get(port: int, path: str, context: ssl.SSLContext) -> int:
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=20)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("elements", [4, 300_000])
def test_the_stock_client_infers_over_tls(serve: Serve, pem: Path, elements: int) -> None:
    def scenario(port: int, metrics: int) -> None:
        x = stock.InferInput("x", [1, elements], "FP32")
        array = np.arange(elements, dtype=np.float32).reshape(1, -1)
        x.set_data_from_numpy(array)
        context = trusting(pem)
        with stock.InferenceServerClient(f"localhost:{port}", ssl=True, ssl_context_factory=lambda: context) as client:
            for _ in range(3):
                np.testing.assert_array_equal(client.infer("m", [x]).as_numpy("y"), array)

    serve(files(pem), scenario)


def test_requests_of_a_pipeline_are_answered_in_order_and_a_close_is_clean(serve: Serve, pem: Path) -> None:
    paths = ["/v2/health/live", "/v2/models/nothing", "/v2/models/m/ready"]
    heads = [f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n" for path in paths]
    last = "GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    def scenario(port: int, metrics: int) -> None:
        with (
            socket.create_connection(("127.0.0.1", port), 20) as plain,
            trusting(pem).wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            secure.sendall("".join([*heads, last]).encode())
            received = b""
            while piece := secure.recv(65536):  # a missing close-notify is an SSLEOFError
                received += piece
        assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"404", b"200", b"200"]
        assert b'"name":"triton"' in received

    serve(files(pem), scenario)


def test_a_client_without_tls_is_told_so_and_disturbs_no_other(serve: Serve, pem: Path) -> None:
    def scenario(port: int, metrics: int) -> None:
        responses = []
        for rubbish in (b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(70_000), b""):
            with socket.create_connection(("127.0.0.1", port), 20) as plain:
                plain.sendall(rubbish)
                plain.shutdown(socket.SHUT_WR)
                responses.append(_rest(plain))
        assert responses[0].startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert json.loads(responses[0].partition(b"\r\n\r\n")[2]) == {"error": "this port speaks TLS: connect by https"}
        assert not any(b"HTTP/1.1" in words for words in responses[1:])
        assert get(port, "/v2", trusting(pem)) == 200

    serve(files(pem), scenario)


def _rest(connection: socket.socket) -> bytes:
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionError:
        pass
    return received


def test_a_handshake_that_does_not_end_is_closed(serve: Serve, pem: Path) -> None:
    def scenario(port: int, metrics: int) -> None:
        with socket.create_connection(("127.0.0.1", port), 20) as plain:
            plain.sendall(b"\x16\x03\x01")  # the beginning of a ClientHello
            assert get(port, "/v2", trusting(pem)) == 200
            assert _rest(plain) == b""  # closed by the server, within the time-out of the socket

    serve(files(pem) | {"http_header_timeout_secs": 1}, scenario)


def test_interceptors_know_clients_by_their_certificates(serve: Serve, pem: Path, http_server: str) -> None:
    def scenario(port: int, metrics: int) -> None:
        for each, path in ((port, "/v2"), (metrics, "/metrics")):
            assert get(each, path, trusting(pem, "b")) == 200
            for stranger in ("", "ec"):
                with pytest.raises(OSError):  # noqa: PT011
                    get(each, path, trusting(pem, stranger))

    serve(files(pem, client_ca="b.crt") | {"metrics_use_ssl": True}, scenario)
    assert Witness.seen == [("http", "b", True), ("metrics", "b", True)]


@pytest.mark.parametrize("has_tls", [True, False])
def test_metrics_have_tls_by_a_flag_of_their_own(serve: Serve, pem: Path, has_tls: bool) -> None:
    def scenario(port: int, metrics: int) -> None:
        if has_tls:
            assert get(metrics, "/metrics", trusting(pem)) == 200
            return
        connection = http.client.HTTPConnection("127.0.0.1", metrics, timeout=20)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 200
        connection.close()

    serve(files(pem) | {"metrics_use_ssl": has_tls}, scenario)


def test_tls_of_metrics_needs_that_of_http(serve: Serve) -> None:
    with pytest.raises(ConfigError, match="--metrics-use-ssl needs --http-use-ssl"):
        serve({"metrics_use_ssl": True})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"certificate": ""}, "HTTP over TLS needs --http-server-cert: the path of a PEM file"),
        ({"key": "b.key"}, "--http-server-key: the key in '{0}/b.key' does not fit the first certificate in '{0}/a"),
        ({"client_ca": "text"}, "--http-root-cert: '{}/text' is no certificate in PEM form"),
    ],
)
def test_a_file_that_will_not_do_ends_the_start(serve: Serve, pem: Path, options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(files(pem, **options))
    assert caught.value.message.startswith(text.format(pem))
