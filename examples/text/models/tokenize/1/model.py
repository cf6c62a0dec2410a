"""Texts to word pieces, with the tokenizer that MiniLM was trained with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self.tokenizer = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
        self.tokenizer.enable_truncation(int(parameters["max_tokens"]["string_value"]))
        self.tokenizer.enable_padding()  # to the length of the longest text of a request

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        tensor = pb_utils.get_input_tensor_by_name(request, "text")
        assert tensor is not None  # the server checks that all inputs are present
        try:
            texts = [text.decode() for text in tensor.as_numpy().ravel()]
        except UnicodeDecodeError as error:
            refusal = pb_utils.TritonError(f"input 'text' is not UTF-8: {error}", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=refusal)
        return pb_utils.InferenceResponse(self.outputs(self.tokenizer.encode_batch(texts)))

    def outputs(self, encodings: Sequence[Encoding]) -> list[pb_utils.Tensor]:
        """``input_ids`` and ``attention_mask``, both i64[texts, tokens]."""
        ids = np.array([encoding.ids for encoding in encodings], np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
        return [pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("attention_mask", mask)]
