"""Files of a load request, from this machine and from another address, over every host."""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from tests.conftest import Headrace

    Start = Callable[..., Headrace]

HOSTS = {"native": (), "others": ("--http-server=hypercorn", "--grpc-server=grpcio")}
CONFIG = (
    '{"backend": "identity", "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}], '
    '"output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}]}'
)
FILES = {"file:1/model.py": b"raise SystemExit"}
KEYS = (
    "--http-restricted-api=model-repository:key=sesame",
    "--grpc-restricted-protocol=model-repository:key=sesame",
)


def own_address() -> str:
    """An address of this machine that is not loopback: the one that packets to elsewhere would have. None are sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address: str = probe.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    return address


@pytest.fixture(params=list(HOSTS))
def start(request: pytest.FixtureRequest, serve: Start, add_model: Callable[..., Path], tmp_path: Path) -> Start:
    def start(*words: str) -> Headrace:
        add_model(tmp_path / "models", "echo")
        everywhere = ("--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--model-control-mode=explicit")
        return serve(f"--model-repository={tmp_path / 'models'}", *everywhere, *HOSTS[request.param], *words)

    return start


def load(server: Headrace, address: str, files: bool = True, headers: Mapping[str, str] | None = None) -> list[str]:
    """Load over HTTP and over gRPC. Return the error text of each, empty if it has worked."""
    brings = {"config": CONFIG, "files": FILES} if files else {}
    reasons = []
    over_http = tritonclient.http.InferenceServerClient(f"{address}:{server.http}")
    over_grpc = tritonclient.grpc.InferenceServerClient(f"{address}:{server.grpc}")
    prefix = {f"triton-grpc-protocol-{k}" if k == "key" else k: v for k, v in (headers or {}).items()}
    for client, client_headers in ((over_http, dict(headers or {})), (over_grpc, prefix)):
        try:
            client.load_model("echo", headers=client_headers, **brings)
            reasons.append("")
        except InferenceServerException as error:
            reasons.append(str(error))
        client.close()
    return reasons


def test_from_elsewhere_a_model_is_loaded_by_name_and_brings_no_files(start: Start) -> None:
    address, server = own_address(), start()
    assert load(server, address, files=False) == ["", ""]
    for reason in load(server, address):
        assert f"this load came from {address}" in reason
        assert "--model-files-from=any" in reason
    assert load(server, "127.0.0.1") == ["", ""]
    warnings = [line for line in server.lines if "open to other machines" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("W")
    assert warnings[0].count("0.0.0.0: inference, loading and unloading models by name, but not with files") == 2


def test_request_through_a_proxy_or_a_browser_is_not_from_this_machine(start: Start) -> None:
    server = start()
    for header in ({"x-forwarded-for": "192.0.2.7"}, {"origin": "https://example.org"}):
        reasons = load(server, "127.0.0.1", headers=header)
        assert all(f"with the header '{next(iter(header))}'" in text for text in reasons), reasons


def test_the_flag_admits_all_clients_with_a_warning(start: Start) -> None:
    address, server = own_address(), start("--model-files-from=any")
    assert load(server, address) == ["", ""]
    assert "files of their own, which are code that the server runs" in server.log


def test_model_files_from_none_refuses_all_files(start: Start) -> None:
    server = start("--model-files-from=none")
    assert all("--model-files-from=none" in reason for reason in load(server, "127.0.0.1"))
    assert load(server, "127.0.0.1", files=False) == ["", ""]


def test_the_key_of_the_restricted_api_is_enough(start: Start) -> None:
    address, server = own_address(), start(*KEYS)
    assert all("restricted" in reason for reason in load(server, address))
    assert all("restricted" in reason for reason in load(server, "127.0.0.1", headers={"key": "guess"}))
    assert load(server, address, headers={"key": "sesame"}) == ["", ""]
    lines = [line for line in server.lines if "open to other machines" in line]
    assert len(lines) == 1
    assert lines[0].startswith("I")


def test_a_refused_file_is_not_decoded(start: Start) -> None:
    """Neither decoded nor written: the refusal is first, whatever is invalid in the rest."""
    address, server = own_address(), start()
    connection = http.client.HTTPConnection(address, server.http, timeout=30)
    body = {"parameters": {"file:../x": base64.b64encode(b"x").decode() + "!", "config": "{"}}
    connection.request("POST", "/v2/repository/models/echo/load", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 501
    assert b"loopback addresses only" in response.read()
    connection.close()


def test_a_server_on_loopback_logs_no_warning(serve: Start, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    server = serve(f"--model-repository={tmp_path / 'models'}", "--model-control-mode=explicit")
    assert server.finish(15) == 0
    assert "open to" not in server.log
