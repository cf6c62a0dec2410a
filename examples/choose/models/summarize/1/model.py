"""Keeps the sentences with the most frequent words of the text: Luhn, 1958, in a few lines."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

import triton_python_backend_utils as pb_utils

SHORTEST = 5  #: letters; shorter words are mostly such as "the" and "with"


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.sentences = int(json.loads(args["model_config"])["parameters"]["sentences"]["string_value"])

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self.answer(request) for request in requests]

    def answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        tensor = pb_utils.get_input_tensor_by_name(request, "text")
        assert tensor is not None  # the server checks that all inputs are present
        summary = summarize(tensor.as_numpy()[0].decode(errors="replace"), self.sentences)
        return pb_utils.InferenceResponse([pb_utils.Tensor("summary", np.array([summary.encode()], np.object_))])


def summarize(text: str, count: int) -> str:
    """Return the ``count`` sentences of ``text`` with the most frequent words, in the order of ``text``."""
    frequency = Counter(words(text))
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())

    def weight(number: int) -> float:
        found = words(sentences[number])
        return sum(frequency[word] for word in found) / max(len(found), 1)

    best = sorted(range(len(sentences)), key=weight, reverse=True)[:count]
    return " ".join(sentences[number] for number in sorted(best))


def words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if len(word) >= SHORTEST]
