"""A Python model whose requests the server pads: it joins them as they are, and answers for all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.testing.serving import serve

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        def joined(name):
            return np.concatenate([pb_utils.get_input_tensor_by_name(each, name).as_numpy() for each in requests])

        x, mask = joined("x"), joined("mask")
        total, y = (x * mask).sum(1, keepdims=True), 2 * x
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("sum", total[n : n + 1]), pb_utils.Tensor("y", y[n : n + 1])])
            for n in range(len(requests))
        ]
"""
PAD = {"input": "x", "axis": 0, "buckets": [4, 8], "value": 9, "mask": {"name": "mask", "data_type": "TYPE_FP32"}}
CONFIG = """backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [-1] }
output [{ name: "sum" data_type: TYPE_FP32 dims: [1] }, { name: "y" data_type: TYPE_FP32 dims: [-1] }]
dynamic_batching { } instance_group { count: 1 kind: KIND_CPU }
"""


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_python_model_gets_requests_of_the_sizes_that_are_said_and_answers_are_cut(
    tmp_path: Path, isolation: str
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(MODEL)
    values = {"isolation": isolation, "padding": json.dumps({"pad": [PAD]}).replace('"', '\\"')}
    parameters = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()]
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG + "\n".join(parameters))
    with serve(tmp_path) as server:
        for length in (1, 4, 7):
            x: Any = np.arange(1, length + 1, dtype=np.float32).reshape(1, length)
            outputs = server.infer("m", {"x": x}).outputs
            np.testing.assert_array_equal(outputs["y"], 2 * x)
            np.testing.assert_array_equal(outputs["sum"], x.sum(1, keepdims=True))
