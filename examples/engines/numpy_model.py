"""The net of make_models.py as a Python model: NumPy computes it for all requests of a batch together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

import triton_python_backend_utils as pb_utils

WHITE = 16.0


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        path = Path(args["model_repository"], args["model_version"], "weights.npz")
        with np.load(path, allow_pickle=False) as arrays:
            self.weights = [(arrays[f"weight{layer}"], arrays[f"bias{layer}"]) for layer in (0, 1)]

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        images = []
        for request in requests:
            image = pb_utils.get_input_tensor_by_name(request, "image")
            assert image is not None  # the server checks that all inputs are present
            images.append(image.as_numpy())
        ends = np.cumsum([len(each) for each in images])[:-1]
        answers = np.split(self.probabilities(np.concatenate(images)), ends)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("probabilities", each)]) for each in answers]

    def probabilities(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """``images`` u8[rows, 8, 8] -> f32[rows, 10]."""
        (weight0, bias0), (weight1, bias1) = self.weights
        pixels = images.reshape(-1, 64).astype(np.float32) / WHITE
        scores = np.maximum(pixels @ weight0 + bias0, 0) @ weight1 + bias1
        powers = np.exp(scores - scores.max(1, keepdims=True))
        result: npt.NDArray[np.float32] = powers / powers.sum(1, keepdims=True)
        return result
