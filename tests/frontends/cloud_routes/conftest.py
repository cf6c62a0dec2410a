"""A server with both ports, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from headrace import HttpPort, Server, ServerOptions, parse_options
from headrace_cloud_routes import multi_model
from tests.frontends.cloud_routes.recorded import write_repository

Serve = Callable[..., dict[str, int]]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "echo", "AIP_PREDICT_ROUTE": "/predict",
                        "AIP_HEALTH_ROUTE": "/health"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for name in ("SAGEMAKER_TRITON_PING_MODE", "SAGEMAKER_TRITON_INFERENCE_TYPE", "AIP_MODE", "AIP_HTTP_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that stands for SageMaker's ``/opt/ml/models``, and a repository beside it."""
    monkeypatch.setattr(multi_model, "ROOT", str(tmp_path / "ml"))
    write_repository(tmp_path / "models", tmp_path / "ml", "identity")
    return tmp_path / "ml"


def options(repository: Path, *words: str) -> ServerOptions:
    free = ("--http-address=127.0.0.1", "--http-port=0", "--metrics-port=0", "--allow-grpc=false")
    clouds = ("--allow-sagemaker=true", "--sagemaker-port=0", "--allow-vertex-ai=true", "--vertex-ai-port=0")
    return parse_options([f"--model-repository={repository}", *free, *clouds, *words])


@pytest.fixture
def serve(shared: Path) -> Iterator[Serve]:
    """Starts a server with more ``words`` on its command line; returns its ports by name."""
    with ExitStack() as running:

        def start(*words: str, mode: str = "explicit") -> dict[str, int]:
            control = (f"--model-control-mode={mode}", *(["--load-model=echo"] if mode == "explicit" else []))
            server = Server(options(shared.parent / "models", *control, *words))
            portal = running.enter_context(start_blocking_portal("asyncio"))
            running.callback(lambda: portal.call(server.stop))
            portal.call(server.start)
            portal.call(server.start_frontends)
            return {each.name: each.port for each in server.frontends if isinstance(each, HttpPort)}

        yield start
