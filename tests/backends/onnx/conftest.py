"""ONNX graphs made on the spot, and the backend driven as core drives it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

from headrace import Backend, Device, Instance, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace_onnx import OnnxRuntime, Parameters


class Graphs:
    """Writes ``<root>/<name>/<version>/model.onnx`` and describes it to the backend."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(
        self,
        nodes: Sequence[onnx.NodeProto],
        inputs: Mapping[str, tuple[int, Sequence[Any] | None]],
        outputs: Mapping[str, tuple[int, Sequence[Any] | None]],
        initializers: Sequence[onnx.TensorProto] = (),
        name: str = "m",
        file: str = "model.onnx",
        domains: Sequence[str] = (),
    ) -> Path:
        """The version's directory. ``inputs`` and ``outputs`` map names to element type and shape; ``domains`` are
        those of operators that are not ONNX's."""
        graph = helper.make_graph(
            list(nodes),
            "g",
            [helper.make_tensor_value_info(key, *io) for key, io in inputs.items()],
            [helper.make_tensor_value_info(key, *io) for key, io in outputs.items()],
            list(initializers),
        )
        imports = [helper.make_opsetid("", 21), *(helper.make_opsetid(domain, 1) for domain in domains)]
        proto = helper.make_model(graph, opset_imports=imports, ir_version=10)
        directory = self.root / name / "1"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(proto.SerializeToString())
        return directory

    def add(self, name: str = "m", rows: Any = "n") -> Path:
        """``S = A + B`` and ``D = A - B`` for f32[rows, 16]."""
        io = (TensorProto.FLOAT, [rows, 16])
        nodes = [helper.make_node("Add", ["A", "B"], ["S"]), helper.make_node("Sub", ["A", "B"], ["D"])]
        return self.write(nodes, {"A": io, "B": io}, {"S": io, "D": io}, name=name)

    def identity(self, element: int, shape: Sequence[Any], name: str = "m") -> Path:
        """``y = x``."""
        io = (element, shape)
        return self.write([helper.make_node("Identity", ["x"], ["y"])], {"x": io}, {"y": io}, name=name)

    def model(self, path: Path, config: str = "", parameters: Parameters | None = None, **fields: Any) -> Model:
        """Return the `Model` that core would create for the version at ``path``."""
        parsed = text_format.Parse(config, ModelConfig())
        parsed.name = path.parent.name
        return Model(path.parent.name, int(path.name), path, parsed, parameters or Parameters(), **fields)

    def serve(
        self, path: Path, config: str = "", parameters: Parameters | None = None, backend: Backend | None = None
    ) -> Instance:
        """An instance with a completed config, loaded on the CPU."""
        backend = backend or OnnxRuntime({})
        model = self.model(path, config, parameters, device=Device("cpu"), instance_name="m_0")
        backend.complete_config(model)
        instance = backend.load(replace(model, shared=backend.share(model)))
        assert isinstance(instance, Instance)
        return instance


@pytest.fixture
def graphs(tmp_path: Path) -> Graphs:
    return Graphs(tmp_path / "repository")


@pytest.fixture
def pair() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two f32[3, 16]."""
    rng = np.random.default_rng(11)
    return rng.normal(size=(3, 16)).astype(np.float32), rng.normal(size=(3, 16)).astype(np.float32)


@pytest.fixture
def at_once() -> Callable[[Sequence[Callable[[], Any]]], list[Any]]:
    """Calls functions at the same moment, each on a thread of its own; their results."""

    def call(functions: Sequence[Callable[[], Any]]) -> list[Any]:
        barrier = threading.Barrier(len(functions))

        def run(function: Callable[[], Any]) -> Any:
            barrier.wait(30)
            return function()

        with ThreadPoolExecutor(len(functions)) as pool:
            return list(pool.map(run, functions))

    return call
