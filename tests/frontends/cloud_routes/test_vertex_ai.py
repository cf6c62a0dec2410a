"""Vertex AI's port: its routes, its model, and what its header may not do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from headrace import ConfigError
from headrace_cli.command_line import read_options
from tests.frontends.cloud_routes.conftest import Serve
from tests.frontends.cloud_routes.recorded import INFER, ask


def redirect(port: int, path: str, body: str = "") -> tuple[int, str]:
    headers = {"X-Vertex-Ai-Triton-Redirect": path}
    answer = ask(port, {"method": "POST", "path": "/predict", "headers": headers, "body": body})
    return answer.status, answer.answer


@pytest.mark.parametrize("path", [
    "v2/repository/models/echo/load", "v2/repository/models/echo/unload", "v2/systemsharedmemory/region/a/register",
    "v2/systemsharedmemory/unregister", "v2/cudasharedmemory/region/a/register",
])  # fmt: skip
def test_a_redirection_changes_nothing_of_the_server(serve: Serve, path: str) -> None:
    port = serve()["vertex_ai"]
    status, text = redirect(port, path)
    assert (status, path in text) == (403, True)
    assert redirect(port, "v2/models/echo/infer", INFER)[0] == 200


def test_metrics_are_behind_the_header(serve: Serve) -> None:
    port = serve()["vertex_ai"]
    status, text = redirect(port, "metrics", INFER)
    assert status == 200
    assert 'nv_inference_request_success{model="echo",version="1"} 0' in text
    assert redirect(serve("--allow-metrics=false")["vertex_ai"], "metrics")[0] == 404


def test_a_restricted_operation_needs_its_key_behind_the_header(serve: Serve) -> None:
    port = serve("--http-restricted-api=model-config,inference:key=secret")["vertex_ai"]
    assert redirect(port, "v2/models/echo/config")[0] == 403
    assert redirect(port, "v2/models/echo/infer", INFER)[0] == 403
    assert redirect(port, "v2/models/echo")[0] == 200


@pytest.mark.parametrize("variable", ["AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"])
def test_both_routes_are_needed(serve: Serve, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv(variable)
    with pytest.raises(ConfigError, match=f"{variable} is not defined for Vertex AI endpoint"):
        serve()


def test_the_default_model_must_be_loaded(serve: Serve) -> None:
    with pytest.raises(ConfigError, match="Expect the default model 'nope' is loaded"):
        serve("--vertex-ai-default-model=nope")


def test_without_a_default_model_there_is_one_model(serve: Serve, shared: Path) -> None:
    shutil.copytree(shared.parent / "models/echo", shared.parent / "models/second")
    with pytest.raises(ConfigError, match="Expect the model repository contains only a single model"):
        serve("--load-model=second")
    port = serve("--load-model=second", "--vertex-ai-default-model=second")["vertex_ai"]
    answer = ask(port, {"method": "POST", "path": "/predict", "headers": {}, "body": INFER})
    assert json.loads(answer.answer)["model_name"] == "second"


def test_the_environment_turns_it_on() -> None:
    environ = {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "7080", "AIP_STORAGE_URI": "/models"}
    options, _ = read_options([], environ)
    assert (options.allow_vertex_ai, options.allow_http, options.allow_grpc) == (True, False, False)
    assert (options.vertex_ai_port, options.model_repository) == (7080, ("/models",))
    assert read_options(["--vertex-ai-port=1", "--allow-http=true"], environ)[0].vertex_ai_port == 1
    with pytest.raises(ConfigError, match=r"AIP_HTTP_PORT: Invalid option value\. Got x"):
        read_options([], environ | {"AIP_HTTP_PORT": "x"})
