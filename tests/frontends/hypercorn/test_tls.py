"""TLS and ALPN of hypercorn: the tests of core on this host, and HTTP/2 by httpx."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.core.conftest import gated, make_server, repository, write_model
from tests.core.headrace_hosts.test_tls_files import client_of, pem
from tests.core.headrace_http.test_tls import (
    Serve,
    Witness,
    files,
    serve,
    test_a_client_without_tls_is_told_so_and_disturbs_no_other,
    test_a_file_that_will_not_do_ends_the_start,
    test_a_handshake_that_does_not_end_is_closed,
    test_interceptors_know_clients_by_their_certificates,
    test_metrics_have_tls_by_a_flag_of_their_own,
    test_the_stock_client_infers_over_tls,
)

__all__ = [
    "gated",
    "make_server",
    "pem",
    "repository",
    "serve",
    "test_a_client_without_tls_is_told_so_and_disturbs_no_other",
    "test_a_file_that_will_not_do_ends_the_start",
    "test_a_handshake_that_does_not_end_is_closed",
    "test_interceptors_know_clients_by_their_certificates",
    "test_metrics_have_tls_by_a_flag_of_their_own",
    "test_the_stock_client_infers_over_tls",
    "write_model",
]


@pytest.fixture
def http_server() -> str:
    return "hypercorn"


@pytest.mark.parametrize(("http2", "version"), [(True, "HTTP/2"), (False, "HTTP/1.1")])
def test_the_client_chooses_the_version_by_alpn(serve: Serve, pem: Path, http2: bool, version: str) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}

    def scenario(port: int, metrics: int) -> None:
        with httpx.Client(base_url=f"https://localhost:{port}", verify=client_of(pem, "b"), http2=http2) as client:
            for _ in range(3):
                reply = client.post("/v2/models/m/infer", json=body)
                assert (reply.http_version, reply.status_code) == (version, 200)
                assert reply.json()["outputs"][0]["data"] == [1, 2]

    serve(files(pem, client_ca="b.crt"), scenario)
    assert set(Witness.seen) == {("http", "b", True)}
