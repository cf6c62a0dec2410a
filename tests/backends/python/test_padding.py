"""A Python model with padded requests, which it concatenates and answers at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_testing.serving import serve

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        def joined(name):
            return np.concatenate([pb_utils.get_input_tensor_by_name(each, name).as_numpy() for each in requests])

        x, mask = joined("x"), joined("mask")
        total, y, rows = (x * mask).sum(1, keepdims=True), 2 * x, np.full((len(x), 1), len(x), np.int32)
        ends = np.cumsum([len(pb_utils.get_input_tensor_by_name(each, "x").as_numpy()) for each in requests])[:-1]
        outputs = [np.split(output, ends) for output in (total, y, rows)]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(*pair) for pair in zip(("sum", "y", "rows"), parts)])
            for parts in zip(*outputs)
        ]
"""
PAD = {"input": "x", "axis": 0, "buckets": [4, 8], "value": 9, "mask": {"name": "mask", "data_type": "TYPE_FP32"}}
CONFIG = """backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [-1] }
output [{ name: "sum" data_type: TYPE_FP32 dims: [1] }, { name: "y" data_type: TYPE_FP32 dims: [-1] },
         { name: "rows" data_type: TYPE_INT32 dims: [1] }]
dynamic_batching { } instance_group { count: 1 kind: KIND_CPU }
"""


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_python_model_gets_padded_requests_and_its_responses_are_cut(tmp_path: Path, isolation: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(MODEL)
    values = {
        "isolation": isolation,
        "padding": json.dumps({"pad": [PAD], "pad_batch_to": [2, 4, 8]}).replace('"', '\\"'),
    }
    parameters = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()]
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG + "\n".join(parameters))
    with serve(tmp_path) as server:
        for length in (1, 4, 7):
            x: Any = np.arange(1, 3 * length + 1, dtype=np.float32).reshape(3, length)
            outputs = server.infer("m", {"x": x}).outputs
            np.testing.assert_array_equal(outputs["y"], 2 * x)
            np.testing.assert_array_equal(outputs["sum"], x.sum(1, keepdims=True))
            assert outputs["rows"].tolist() == [[4]] * 3  # type: ignore[union-attr]
