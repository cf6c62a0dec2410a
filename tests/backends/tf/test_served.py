"""TensorFlow models behind a server: over HTTP and gRPC, in threads and processes, beside broken neighbours."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import BytesTensor, Server
from headrace_testing.serving import WAYS, Way, infer, on_loop, serve
from tests.backends.tf.conftest import SavedModels

tf = pytest.importorskip("tensorflow")

GRAPH = """platform: "tensorflow_graphdef" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [2] }"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with ``bare``, ``words``, ``frozen`` and a ``broken`` model."""
    models = SavedModels(tmp_path_factory.mktemp("repository"))
    models.add("bare")
    words = [tf.TensorSpec([None, 1], tf.string, name="x")]
    models.save(lambda x: {"y": tf.strings.upper(x), "n": tf.strings.length(x)}, *words, name="words")
    models.frozen(lambda: tf.multiply(tf.compat.v1.placeholder(tf.float32, [None, 2], "x"), 2.0, name="y"), "frozen")
    models.config(GRAPH, "frozen")
    (models.add("broken") / "model.savedmodel/saved_model.pb").write_bytes(b"\xff")
    with serve(models.root, listen=True, exit_on_error=False) as server:
        yield server


@pytest.mark.parametrize("over", WAYS)
def test_every_kind_is_served_over(server: Server, over: Way) -> None:
    """By the stock client."""
    a, b = np.random.default_rng(1).normal(size=(2, 3, 16)).astype(np.float32)
    outputs = infer(server, "bare", {"A": a, "B": b}, over)
    np.testing.assert_allclose(outputs["S"], a + b, rtol=1e-6)
    np.testing.assert_allclose(outputs["D"], a - b, rtol=1e-6)
    x = np.array([[1, 2]], np.float32)
    np.testing.assert_array_equal(infer(server, "frozen", {"x": x}, over)["y"], 2 * x)
    found = infer(server, "words", {"x": BytesTensor.from_items([b"one", b""], (2, 1))}, over)
    assert isinstance(found["y"], BytesTensor)
    assert found["y"].items() == [b"ONE", b""]
    np.testing.assert_array_equal(found["n"], [[3], [0]])


def test_a_broken_model_does_not_affect_the_others(server: Server) -> None:
    states = {entry.name: (entry.state, entry.reason) for entry in server.index()}
    assert {name: state for name, (state, _) in states.items()} == {
        "bare": "READY",
        "broken": "UNAVAILABLE",
        "frozen": "READY",
        "words": "READY",
    }
    assert "broken/1/model.savedmodel/saved_model.pb' is no SavedModel" in states["broken"][1]


def test_a_platform_of_another_backend_is_refused(models: Any) -> None:
    models.add()
    models.config('backend: "tensorflow" platform: "onnxruntime_onnx"')
    assert "onnxruntime_onnx" in models.reason()


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_model_is_served_and_unloaded_with_each_isolation(models: Any, isolation: str) -> None:
    models.add()
    models.config(models.parameters(isolation=isolation) + "instance_group { count: 1 kind: KIND_CPU }")
    a, b = np.random.default_rng(1).normal(size=(2, 3, 16)).astype(np.float32)
    with serve(models.root, model_control_mode="explicit", load_model=("*",)) as server:
        np.testing.assert_array_equal(server.infer("m", {"A": a, "B": b}).outputs["S"], a + b)

        async def unload() -> None:
            await server.unload("m")
            while server.index()[0].reason != "unloaded":
                await asyncio.sleep(0.01)

        on_loop(server, asyncio.wait_for(unload(), 20))


WITHOUT = """
import json, sys
from pathlib import Path
from headrace_testing.serving import serve
with serve(Path(sys.argv[1])) as server:
    (name,) = [entry.name for entry in server.index() if entry.state == "READY"]
    found = sorted(server.plugins.backends.names())
print(json.dumps([name, found, sorted(name for name in sys.modules if name.split(".")[0] in ("tensorflow", "keras"))]))
"""


def test_a_server_without_such_a_model_imports_no_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "other/1").mkdir(parents=True)
    (tmp_path / "other/config.pbtxt").write_text(
        """backend: "identity" input { name: "x" data_type: TYPE_FP32 dims: [1] }
        output { name: "y" data_type: TYPE_FP32 dims: [1] }"""
    )
    command = [sys.executable, "-c", WITHOUT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    name, backends, modules = json.loads(done.stdout.splitlines()[-1])
    assert name == "other"
    assert "tensorflow" in backends
    assert modules == []
