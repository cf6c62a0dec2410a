"""The area of a circle, by the usual formula."""

from __future__ import annotations

from collections.abc import Sequence

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [_answer(request) for request in requests]


def _answer(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    radius = pb_utils.get_input_tensor_by_name(request, "radius")
    assert radius is not None  # the server checks that all inputs are present
    return pb_utils.InferenceResponse([pb_utils.Tensor("area", 3.14 * radius.as_numpy() ** 2)])
