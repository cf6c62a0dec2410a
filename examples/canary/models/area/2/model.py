"""The area of a circle, by logarithms. It fails for a radius of 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [_answer(request) for request in requests]


def _answer(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    radius = pb_utils.get_input_tensor_by_name(request, "radius")
    assert radius is not None  # the server checks that all inputs are present
    area = math.pi * math.exp(2 * math.log(radius.as_numpy()[0]))
    return pb_utils.InferenceResponse([pb_utils.Tensor("area", np.array([area]))])
