from __future__ import annotations

from ctypes.util import find_library
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from headrace import Device, Instance
from headrace_onnx import OnnxRuntime, providers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        providers.CUDA not in onnxruntime.get_available_providers(), reason="this onnxruntime has no CUDA"
    ),
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no GPU here"),
]


def on_gpu(graphs: Any, path: Any, config: str = "") -> Instance:
    backend = OnnxRuntime({})
    text = f"instance_group {{ kind: KIND_GPU }} {config}"
    model = graphs.model(path, text, device=Device("gpu", 0), instance_name="m_0")
    backend.complete_config(model)
    instance = backend.load(replace(model, shared=backend.share(model)))
    assert isinstance(instance, Instance)
    return instance


def test_answers_on_the_gpu_are_those_of_arithmetic(graphs: Any, pair: Any) -> None:
    outputs = on_gpu(graphs, graphs.add()).execute({"A": pair[0], "B": pair[1]})
    np.testing.assert_array_equal(outputs["S"], pair[0] + pair[1])
    np.testing.assert_array_equal(outputs["D"], pair[0] - pair[1])


def test_a_kept_answer_survives_the_next_run(graphs: Any, pair: Any) -> None:
    instance = on_gpu(graphs, graphs.add())
    result = instance.execute({"A": pair[0], "B": pair[1]})["S"]
    instance.execute({"A": pair[1], "B": pair[1]})
    np.testing.assert_array_equal(result, pair[0] + pair[1])


def test_half_precision_passes(graphs: Any) -> None:
    x = np.array([[1.5, -2]], np.float16)
    np.testing.assert_array_equal(
        on_gpu(graphs, graphs.identity(TensorProto.FLOAT16, ["n", 2])).execute({"x": x})["y"], x
    )


def accelerated(name: str, **parameters: str) -> str:
    entries = "".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
    return f'optimization {{ execution_accelerators {{ gpu_execution_accelerator {{ name: "{name}" {entries} }} }} }}'


@pytest.mark.parametrize(
    "config",
    [
        accelerated("cuda", cudnn_conv_algo_search="HEURISTIC", gpu_mem_limit="1073741824", use_tf32="0"),
        pytest.param(
            accelerated("tensorrt", precision_mode="FP32", max_workspace_size_bytes="1073741824"),
            marks=pytest.mark.skipif(find_library("nvinfer") is None, reason="no TensorRT here"),
        ),
    ],
    ids=["cuda", "tensorrt"],
)
def test_an_accelerator_answers_as_arithmetic_does(graphs: Any, pair: Any, config: str) -> None:
    outputs = on_gpu(graphs, graphs.add(), config).execute({"A": pair[0], "B": pair[1]})
    np.testing.assert_allclose(outputs["S"], pair[0] + pair[1], rtol=1e-6)


def test_weights_in_other_files_are_found_on_the_gpu(graphs: Any) -> None:
    io = (TensorProto.FLOAT, ["n", 4])
    weights = TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="w.bin")
    path = graphs.write([helper.make_node("Add", ["x", "W"], ["y"])], {"x": io}, {"y": io}, [weights])
    (path / "w.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    y = on_gpu(graphs, path).execute({"x": np.ones((1, 4), np.float32)})["y"]
    np.testing.assert_array_equal(y, [[1, 2, 3, 4]])
