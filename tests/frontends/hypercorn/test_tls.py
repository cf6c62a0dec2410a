"""TLS and ALPN, by the stock client and by httpx, with certificates of openssl."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
import tritonclient.http as stock

from headrace import AnyOperation, Caller, ConfigError, Interceptor, Server, builtins, hookimpl
from headrace_hypercorn import HypercornOptions
from tests.core.conftest import gated, make_server, repository, write_model
from tests.core.headrace_grpc.test_tls import pem

__all__ = ["gated", "make_server", "pem", "repository", "write_model"]

CONFIG = """
backend: "identity"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
Serve = Callable[..., None]


class Witness(Interceptor):
    """Notes who asks."""

    name: ClassVar[str] = "witness"
    seen: ClassVar[list[tuple[str, bool]]] = []

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        self.seen.append((caller.principal, caller.certificate is not None))


def files(pem: Path, certificate: str = "a.crt", key: str = "a.key", client_ca: str = "") -> HypercornOptions:
    certificate, key, client_ca = (str(pem / name) if name else "" for name in (certificate, key, client_ca))
    return HypercornOptions(certificate, key, client_ca)


@pytest.fixture
def serve(write_model: Any, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Runs ``scenario(port)`` on a thread, against a server with TLS."""
    monkeypatch.setattr(builtins, "register_interceptors", hookimpl(lambda: [Witness]), raising=False)
    monkeypatch.setattr(Witness, "seen", [])

    def run(options: HypercornOptions, scenario: Callable[[int], None] | None = None, **further: Any) -> None:
        write_model("m", CONFIG)

        async def main() -> None:
            given = {"http_server": "hypercorn", "http_address": "127.0.0.1", "http_port": 0, **further}
            server = make_server(
                **given, allow_grpc=False, allow_metrics=False, exit_timeout_secs=5, plugin_options=[options]
            )
            async with server:
                await server.start_frontends()
                if scenario is not None:
                    await asyncio.to_thread(scenario, server.frontends[0].port)  # type: ignore[attr-defined]

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


def client_of(pem: Path, identity: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pem / "a.crt"))
    if identity:
        context.load_cert_chain(pem / f"{identity}.crt", pem / f"{identity}.key")
    return context


def test_the_stock_client_infers_over_tls(serve: Serve, pem: Path) -> None:
    def scenario(port: int) -> None:
        x = stock.InferInput("x", [1, 300_000], "FP32")
        array = np.arange(300_000, dtype=np.float32).reshape(1, -1)
        x.set_data_from_numpy(array)
        context = client_of(pem)
        with stock.InferenceServerClient(f"localhost:{port}", ssl=True, ssl_context_factory=lambda: context) as client:
            np.testing.assert_array_equal(client.infer("m", [x]).as_numpy("y"), array)

    serve(files(pem), scenario)


@pytest.mark.parametrize(("http2", "version"), [(True, "HTTP/2"), (False, "HTTP/1.1")])
def test_the_client_chooses_the_version_by_alpn(serve: Serve, pem: Path, http2: bool, version: str) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}

    def scenario(port: int) -> None:
        with httpx.Client(base_url=f"https://localhost:{port}", verify=client_of(pem), http2=http2) as client:
            for _ in range(3):
                reply = client.post("/v2/models/m/infer", json=body)
                assert (reply.http_version, reply.status_code) == (version, 200)
                assert reply.json()["outputs"][0]["data"] == [1, 2]

    serve(files(pem), scenario)


def test_a_client_without_tls_is_not_answered(serve: Serve, pem: Path) -> None:
    def scenario(port: int) -> None:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://localhost:{port}/v2")

    serve(files(pem), scenario)


@pytest.mark.parametrize("http2", [True, False])
def test_interceptors_know_clients_by_their_certificates(serve: Serve, pem: Path, http2: bool) -> None:
    def scenario(port: int) -> None:
        url = f"https://localhost:{port}/v2"
        with httpx.Client(verify=client_of(pem, "b"), http2=http2) as client:
            assert client.get(url).status_code == 200
        for stranger in ("", "ec"):
            with (
                httpx.Client(verify=client_of(pem, stranger), http2=http2) as client,
                pytest.raises(httpx.TransportError),
            ):
                client.get(url)

    serve(files(pem, client_ca="b.crt"), scenario)
    assert Witness.seen == [("b", True)]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"certificate": ""}, "HTTP over TLS needs --hypercorn-certificate: the path of a PEM file"),
        ({"key": ""}, "HTTP over TLS needs --hypercorn-key: the path of a PEM file"),
        ({"certificate": "gone"}, "--hypercorn-certificate: can not read '{}/gone': No such file or directory"),
        ({"key": "b.key"}, "--hypercorn-key: the key in '{0}/b.key' does not fit the certificate in '{0}/a.crt'"),
        ({"key": "locked.key"}, "--hypercorn-key: the key is encrypted; give one that needs no password"),
        ({"client_ca": "text"}, "--hypercorn-client-ca: '{}/text' is no certificate in PEM form"),
        ({"certificate": "", "key": "", "client_ca": "b.crt"}, "HTTP over TLS needs --hypercorn-certificate: "),
    ],
)
def test_a_file_that_will_not_do_ends_the_start(serve: Serve, pem: Path, given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(files(pem, **given))
    assert caught.value.message.startswith(text.format(pem))


def test_tls_without_the_host_is_refused(serve: Serve, pem: Path) -> None:
    with pytest.raises(ConfigError, match="have no effect without --http-server=hypercorn"):
        serve(files(pem), http_server="native")
