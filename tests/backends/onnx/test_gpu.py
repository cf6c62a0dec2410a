from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto

from headrace import Device, Instance
from headrace_onnx import OnnxRuntime, providers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        providers.CUDA not in onnxruntime.get_available_providers(), reason="this onnxruntime has no CUDA"
    ),
]


def on_gpu(graphs: Any, path: Any) -> Instance:
    backend = OnnxRuntime({})
    model = graphs.model(path, "instance_group { kind: KIND_GPU }", device=Device("gpu", 0), instance_name="m_0")
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
    kept = instance.execute({"A": pair[0], "B": pair[1]})["S"]
    instance.execute({"A": pair[1], "B": pair[1]})
    np.testing.assert_array_equal(kept, pair[0] + pair[1])


def test_half_precision_passes(graphs: Any) -> None:
    x = np.array([[1.5, -2]], np.float16)
    np.testing.assert_array_equal(
        on_gpu(graphs, graphs.identity(TensorProto.FLOAT16, ["n", 2])).execute({"x": x})["y"], x
    )
