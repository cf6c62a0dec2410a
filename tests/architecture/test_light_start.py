"""What is installed and not used costs a start next to nothing: it imports its declarations only.

A process starts a server with all plugins and no model, listens, and prints its modules. Each package may import as
many modules as the table says. What loads a model, opens a storage or runs a command is imported when it is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

START = """
import asyncio, json, sys
import headrace_cli.serve
from headrace import Server, ServerOptions

async def start():
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    async with Server(ServerOptions(model_repository=(sys.argv[1],), http_address="127.0.0.1", **ports)) as server:
        await server.start_frontends()
        print(json.dumps([list(sys.modules), [one.distribution for one in server.plugins.plugins]]))

asyncio.run(start())
"""
#: The modules of a package whose parts are chosen by name: the package, the part, its parameters and options.
MOST = 5
#: The packages that every server needs more of, because it answers their paths or asks their interceptors.
MORE = {
    "headrace_access": 6,
    "headrace_ensemble": 7,
    "headrace_logging": 12,
    "headrace_on_demand": 9,
    "headrace_openai": 13,
    "headrace_quotas": 12,
    "headrace_router": 9,
    "headrace_sequence": 11,
    "headrace_shm": 8,
    "headrace_trace": 11,
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Counter[str], set[str]]:
    """The modules of the started server by package, and the distributions of its plugins."""
    command = [sys.executable, "-c", START, str(tmp_path_factory.mktemp("models"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr
    modules, distributions = json.loads(done.stdout.splitlines()[-1])
    return Counter(name.partition(".")[0] for name in modules), set(distributions)


def test_a_plugin_imports_what_declares_its_parts_and_no_more(started: tuple[Counter[str], set[str]]) -> None:
    counts, distributions = started
    own = {path.name for path in (Path(__file__).parents[2] / "core/src").iterdir()}
    plugins = {name: count for name, count in counts.items() if name.startswith("headrace_") and name not in own}
    assert len(plugins) >= len(distributions) - 1, "a plugin is missing: run this where all are installed"
    assert {name: n for name, n in plugins.items() if n > MORE.get(name, MOST)} == {}


def test_the_table_names_no_package_without_need(started: tuple[Counter[str], set[str]]) -> None:
    assert [name for name in MORE if started[0][name] <= MOST] == []


def test_no_plugin_imports_an_engine_or_another_heavy_package(started: tuple[Counter[str], set[str]]) -> None:
    unused = {"opentelemetry", "python_multipart", "triton_python_backend_utils"}
    unused |= {"grpc", "hypercorn", "jwt", "cryptography", "redis", "fsspec", "httpx", "aiohttp", "jinja2", "zstandard"}
    unused |= {"onnx", "onnxruntime", "openvino", "torch", "tensorflow", "transformers", "tarfile", "ray"}
    assert sorted(unused & started[0].keys()) == []
