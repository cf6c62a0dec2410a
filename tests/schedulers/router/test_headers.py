"""Routers that decide by headers, over every protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from headrace import Server
from headrace_router.router_options import RouterOptions
from headrace_testing.serving import serve

from .conftest import identity, router, write

ROW = np.array([[1, 2]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    write(repository, "m", identity(more="version_policy { all { } }"), (1, 2))
    rules = "header:X-Canary = yes -> m:2; header:x-any -> m:2"
    write(repository, "r", router("m:1 = 1, m:2 = 0", rules=rules))
    write(repository, "sticky", router("m:1 = 1, m:2 = 1", sticky="header:x-user"))
    with serve(repository, listen=True, plugin_options=(RouterOptions(headers=True),)) as server:
        yield server


def over_http(server: Server, model: str, headers: dict[str, str]) -> str:
    client = httpclient.InferenceServerClient(f"127.0.0.1:{server.options.http_port}")
    x = httpclient.InferInput("x", [1, 2], "FP32")
    x.set_data_from_numpy(ROW)
    found: dict[str, Any] = client.infer(model, [x], headers=headers).get_response()["parameters"]
    return f"{found['headrace_target']} by {found['headrace_routed_by']}"


def over_grpc(server: Server, model: str, headers: dict[str, str]) -> str:
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}")
    x = grpcclient.InferInput("x", [1, 2], "FP32")
    x.set_data_from_numpy(ROW)
    found = client.infer(model, [x], headers=headers).get_response().parameters
    return f"{found['headrace_target'].string_param} by {found['headrace_routed_by'].string_param}"


def over_stream(server: Server, model: str, headers: dict[str, str]) -> str:
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}")
    x = grpcclient.InferInput("x", [1, 2], "FP32")
    x.set_data_from_numpy(ROW)
    answers: list[Any] = []
    client.start_stream(lambda result, error: answers.append(result or error), headers=headers)
    client.async_stream_infer(model, [x])
    client.stop_stream()
    found = answers[0].get_response().parameters
    return f"{found['headrace_target'].string_param} by {found['headrace_routed_by'].string_param}"


OVER = pytest.mark.parametrize("ask", [over_http, over_grpc, over_stream])


@OVER
def test_a_header_chooses_the_target(ask: Callable[..., str], server: Server) -> None:
    for _ in range(2):
        assert ask(server, "r", {}) == "m:1 by weights"
        assert ask(server, "r", {"x-canary": "yes"}) == "m:2 by rule"
        assert ask(server, "r", {"x-canary": "no"}) == "m:1 by weights"
        assert ask(server, "r", {"x-any": "thing"}) == "m:2 by rule"


@OVER
def test_a_key_in_a_header_is_the_same_over_every_protocol(ask: Callable[..., str], server: Server) -> None:
    found = [ask(server, "sticky", {"x-user": f"user{number}"}) for number in range(8)]
    assert found == [over_http(server, "sticky", {"x-user": f"user{number}"}) for number in range(8)]
    assert {*found} == {"m:1 by sticky", "m:2 by sticky"}


def test_a_program_has_no_headers(server: Server) -> None:
    assert server.infer("r", {"x": ROW}).parameters["headrace_target"] == "m:1"


def test_without_the_flag_a_router_with_headers_is_not_loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    repository = tmp_path_factory.mktemp("models")
    write(repository, "m", identity())
    write(repository, "r", router("m = 1", sticky="header:x-user"))
    with serve(repository, strict_readiness=False, exit_on_error=False) as server:
        (reason,) = [entry.reason for entry in server.index() if entry.name == "r"]
    assert "router 'r' decides by a header: start the server with --router-headers=true" in reason
