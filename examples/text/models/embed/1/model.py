"""Texts to embeddings: calls the tokenizer and the net, and computes one vector of the result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import triton_python_backend_utils as pb_utils

Array = npt.NDArray[Any]


class TritonPythonModel:
    async def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Answer all requests concurrently, so that the net can batch them."""
        return await asyncio.gather(*(answer(request) for request in requests))


async def answer(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    tokens = await ask("tokenize", request.inputs(), ["input_ids", "attention_mask"])
    if tokens.has_error():
        return tokens
    net = await ask("minilm", tokens.output_tensors(), ["hidden"])
    if net.has_error():
        return net
    embedding = pooled(output(net, "hidden"), output(tokens, "attention_mask"))
    return pb_utils.InferenceResponse([pb_utils.Tensor("embedding", embedding)])


async def ask(model: str, inputs: Sequence[pb_utils.Tensor], outputs: Sequence[str]) -> pb_utils.InferenceResponse:
    request = pb_utils.InferenceRequest(inputs=inputs, requested_output_names=outputs, model_name=model)
    return await request.async_exec()


def output(response: pb_utils.InferenceResponse, name: str) -> Array:
    tensor = pb_utils.get_output_tensor_by_name(response, name)
    assert tensor is not None
    return tensor.as_numpy()


def pooled(hidden: Array, mask: Array) -> Array:
    """Return the mean of ``hidden`` f32[texts, tokens, 384] over the tokens of each text, with length 1."""
    weights = mask[..., None].astype(np.float32)
    means = (hidden * weights).sum(1) / weights.sum(1)
    return np.asarray(means / np.linalg.norm(means, axis=1, keepdims=True))
