"""Operators for the CPU in a library of a model, which is built here against the headers of OpenVINO's wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from google.protobuf import text_format

from headrace import HeadraceError, ModelConfig, config_to_json
from headrace_testing.serving import on_loop, serve

WHEEL = Path(openvino.__file__).parent
INTERFACE = next((WHEEL / "libs").glob("libopenvino.so*"), None)
LIBRARY = "libadd_one.so"
X = np.array([[1, 2], [3, 4]], np.float32)

#: ``y = AddOne(x)``, an operator that OpenVINO does not have.
GRAPH = """<?xml version="1.0"?>
<net name="network" version="11">
  <layers>
    <layer id="0" name="x" type="Parameter" version="opset1">
      <data shape="?,2" element_type="f32" />
      <output><port id="0" precision="FP32" names="x"><dim>-1</dim><dim>2</dim></port></output>
    </layer>
    <layer id="1" name="AddOne" type="AddOne" version="headrace">
      <input><port id="0" precision="FP32"><dim>-1</dim><dim>2</dim></port></input>
      <output><port id="1" precision="FP32" names="y"><dim>-1</dim><dim>2</dim></port></output>
    </layer>
    <layer id="2" name="y" type="Result" version="opset1">
      <input><port id="0" precision="FP32"><dim>-1</dim><dim>2</dim></port></input>
    </layer>
  </layers>
  <edges>
    <edge from-layer="0" from-port="0" to-layer="1" to-port="0" />
    <edge from-layer="1" from-port="1" to-layer="2" to-port="0" />
  </edges>
</net>
"""
CONFIG = """name: "m" backend: "openvino" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [2] }
output { name: "y" data_type: TYPE_FP32 dims: [2] }"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (compiler := shutil.which("g++")) or INTERFACE is None or not (WHEEL / "include/openvino").is_dir():
        pytest.skip("needs g++, and the headers and libraries of OpenVINO's wheel for Linux")
    built = tmp_path_factory.mktemp("extension") / LIBRARY
    source = Path(__file__).with_name("add_one.cpp")
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-w", f"-I{WHEEL}/include", str(source), "-o", str(built)]
    subprocess.run([*command, str(INTERFACE)], check=True, timeout=150)
    return built


def write(models: Any, library: Path, place: str, parameter: str = LIBRARY, config: str = CONFIG) -> None:
    version = models.root / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.xml").write_text(GRAPH)
    (version / "model.bin").touch()
    shutil.copy(library, models.root / "m" / place)
    models.parameter("CPU_EXTENSION_PATH", parameter, config)


@pytest.mark.parametrize(("place", "isolation"), [("1", "thread"), (".", "thread"), ("1", "process")])
def test_an_operator_of_a_models_library_runs(models: Any, library: Path, place: str, isolation: str) -> None:
    isolated = f'{CONFIG} parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}'
    write(models, library, place, config=isolated)
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], X + 1)


def test_a_config_is_completed_from_a_graph_with_such_an_operator(models: Any, library: Path) -> None:
    write(models, library, "1", config="")
    with serve(models.root) as server:
        assert server.resolve("m").config.max_batch_size == 4
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], X + 1)


def test_without_its_library_the_operator_is_named(models: Any, library: Path) -> None:
    write(models, library, "1")
    models.config(CONFIG)
    with serve(models.root, exit_on_error=False) as server:
        (entry,) = server.index()
    assert "AddOne" in entry.reason


def test_a_library_outside_the_model_is_refused(models: Any, library: Path) -> None:
    for filename in (str(library), "../../" + LIBRARY):
        write(models, library, "..", filename)
        with serve(models.root, exit_on_error=False) as server:
            (entry,) = server.index()
        assert "is outside the model directory" in entry.reason
        shutil.rmtree(models.root / "m")


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("with_files", [False, True])
def test_a_library_in_a_sent_config_is_refused(models: Any, library: Path, isolation: str, with_files: bool) -> None:
    isolated = f'{CONFIG} parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}'
    write(models, library, "1", config=isolated)
    text = (models.root / "m" / "config.pbtxt").read_text()
    sent: dict[str, Any] = {"config": json.dumps(config_to_json(text_format.Parse(text, ModelConfig())))}
    if with_files:
        files = {path.name: path.read_bytes() for path in (models.root / "m" / "1").iterdir()}
        sent |= {f"file:1/{name}": content for name, content in files.items()}
    with serve(models.root, model_control_mode="explicit") as server:
        with pytest.raises(HeadraceError, match="'CPU_EXTENSION_PATH' of model 'm' came with a load request"):
            on_loop(server, server.load("m", sent))
        on_loop(server, server.load("m", {}))  # a config in the repository may name a library
        np.testing.assert_array_equal(server.infer("m", {"x": X}).outputs["y"], X + 1)
