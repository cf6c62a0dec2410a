"""Operators in a library of a model, which is built here against the C interface of ONNX Runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

from headrace import HeadraceError, ModelConfig, config_to_json
from headrace_testing.serving import on_loop, serve

LIBRARY = "libadd_one.so"
X = np.array([[1, 2], [3, 4]], np.float32)
CONFIG = f'name: "m" backend: "onnxruntime" model_operations {{ op_library_filename: "{LIBRARY}" }}'


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (compiler := shutil.which("gcc")):
        pytest.skip("needs gcc")
    built = tmp_path_factory.mktemp("operators") / LIBRARY
    source = Path(__file__).with_name("add_one.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", str(source), "-o", str(built)], check=True)
    return built


def write(graphs: Any, library: Path, place: str, config: str = CONFIG) -> Path:
    """``y = AddOne(x)``, with ``library`` in ``place`` below the model; the version's directory."""
    node = helper.make_node("AddOne", ["x"], ["y"], domain="headrace")
    io = (TensorProto.FLOAT, ["n", 2])
    version: Path = graphs.write([node], {"x": io}, {"y": io}, domains=("headrace",))
    shutil.copy(library, version.parent / place)
    (version.parent / "config.pbtxt").write_text(config)
    return version


def isolated(isolation: str) -> str:
    return f'{CONFIG} parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}'


@pytest.mark.parametrize(("place", "isolation"), [("1", "thread"), (".", "thread"), ("1", "process")])
def test_an_operator_of_a_models_library_runs(graphs: Any, library: Path, place: str, isolation: str) -> None:
    write(graphs, library, place, isolated(isolation))
    with serve(graphs.root) as server:
        assert server.resolve("m").config.max_batch_size == 4  # completed, so that the graph was read
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], X + 1)


def test_without_its_library_the_operator_is_named(graphs: Any, library: Path) -> None:
    write(graphs, library, "1", 'backend: "onnxruntime"')
    with serve(graphs.root, exit_on_error=False) as server:
        (entry,) = server.index()
    assert "AddOne" in entry.reason


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("with_files", [True, False])
def test_a_library_in_a_sent_config_is_refused(
    graphs: Any, library: Path, isolation: str, is_complete: bool, with_files: bool
) -> None:
    version = write(graphs, library, "1", isolated(isolation))
    text = isolated(isolation)
    if is_complete:
        text += """ max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [2] }
            output { name: "y" data_type: TYPE_FP32 dims: [2] }"""
    sent: dict[str, Any] = {"config": json.dumps(config_to_json(text_format.Parse(text, ModelConfig())))}
    if with_files:
        sent |= {f"file:1/{path.name}": path.read_bytes() for path in version.iterdir()}
    with serve(graphs.root, model_control_mode="explicit") as server:
        with pytest.raises(HeadraceError, match="'op_library_filename' of model 'm' came with a load request"):
            on_loop(server, server.load("m", sent))
        on_loop(server, server.load("m", {}))  # a config in the repository may name a library
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], X + 1)
