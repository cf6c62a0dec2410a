"""Calls the model for the length of the text: short texts are kept, long ones are summarized."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self.long_from_words = int(parameters["long_from_words"]["string_value"])

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        text = pb_utils.get_input_tensor_by_name(request, "text")
        assert text is not None  # the server checks that all inputs are present
        model = self.choose(text.as_numpy()[0])
        inner = pb_utils.InferenceRequest(inputs=[text], requested_output_names=["summary"], model_name=model)
        response = inner.exec()
        if response.has_error():
            return response  # unchanged to the caller
        chosen = pb_utils.Tensor("model", np.array([model.encode()], np.object_))
        return pb_utils.InferenceResponse([*response.output_tensors(), chosen])

    def choose(self, text: bytes) -> str:
        return "summarize" if len(text.split()) >= self.long_from_words else "keep"
