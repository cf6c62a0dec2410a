"""Repositories to serve, and callers that use no client library."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace

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
    """Return a function that infers a model over HTTP: ``infer(server, model, values)``."""

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


@pytest.fixture(scope="module")
def gate(
    tmp_path_factory: pytest.TempPathFactory,
    add_model: Callable[..., Path],
    make_gate: Callable[[Path], Gate],
    echo: str,
) -> Gate:
    """The gate of the model ``slow``, which is served beside ``echo`` and ``echo_too``."""
    root = tmp_path_factory.mktemp("models")
    add_model(root, "echo")
    add_model(root, "echo_too")
    return make_gate(add_model(root, "slow", f'backend: "gated"{echo}'))


@pytest.fixture
def install_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts the plugin that a page of the docs writes on the path, with its entry point, as a stranger installs it."""

    def install(page: str) -> Path:
        """The folder of its test."""
        module, test = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        (project,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
        ((part, package),) = re.findall(r'^\[project.entry-points.headrace\]\n(.*) = "(.*)"$', project, re.MULTILINE)
        site = tmp_path / "site"
        info = site / f"{package}-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[headrace]\n{part} = {package}\n")
        (site / f"{package}.py").write_text(module)
        (tmp_path / f"test_{part}.py").write_text(test)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, package, raising=False)
        return tmp_path

    return install


def run_kit(folder: Path) -> str:
    """Run the tests of the plugin in ``folder``, which must pass. Return pytest's output."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, folder.glob("test_*.py"))]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
