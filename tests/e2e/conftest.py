"""Repositories to serve, and callers that use no client library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: An input and an output of any length; ``backend`` is put in front.
ECHO = """
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""


class Reply(NamedTuple):
    status: int
    body: bytes

    @property
    def error(self) -> str:
        text: str = json.loads(self.body)["error"]
        return text


def call(server: Headrace, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
    """A POST over a connection of its own. A body that is not bytes becomes JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=30)
    try:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, content, dict(headers or {}))
        response = connection.getresponse()
        return Reply(response.status, response.read())
    finally:
        connection.close()


@pytest.fixture(scope="session")
def post() -> Callable[..., Reply]:
    return call


@pytest.fixture(scope="session")
def infer() -> Callable[..., list[float]]:
    """What a model answers over HTTP: ``infer(server, model, values)``."""

    def infer(server: Headrace, model: str = "echo", values: tuple[float, ...] = (1.0, 2.0)) -> list[float]:
        tensor = {"name": "IN", "datatype": "FP32", "shape": [len(values)], "data": values}
        reply = call(server, f"/v2/models/{model}/infer", {"inputs": [tensor]})
        assert reply.status == 200, reply.body
        data: list[float] = json.loads(reply.body)["outputs"][0]["data"]
        return data

    return infer


@pytest.fixture(scope="session")
def add_model() -> Callable[..., Path]:
    """Writes a model with one version directory, which is returned: ``add_model(root, name, config)``."""

    def add(root: Path, name: str, config: str = f'backend: "identity"{ECHO}') -> Path:
        version = root / name / "1"
        version.mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        return version

    return add


@pytest.fixture(scope="session")
def echo() -> str:
    """The inputs and outputs of a config that takes IN and gives OUT."""
    return ECHO
