"""The published kit, on a model that embeds; the oracle is transformers called directly."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headrace_testing import BackendConformance, Example
from tests.backends.transformers import tiny_models

TEXTS = ["The quick brown fox", "one two", "naïve", "", "lazy dog"]


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Example:
    folder = tiny_models.bert(tmp_path_factory.mktemp("bert"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder)
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    mask = encoded.attention_mask.unsqueeze(-1)
    with torch.inference_mode():
        vectors = (model(**encoded)[0] * mask).sum(1) / mask.sum(1)
    inputs, outputs = {"text": np.array(TEXTS, object)[:, None]}, {"embedding": vectors.numpy()}
    return Example(folder, inputs, outputs, damage="model.safetensors", tolerance=1e-3)


class TestTransformers(BackendConformance):
    plugin, backend, heavy = "headrace_transformers", "transformers", ("torch", "transformers")

    @pytest.fixture
    def example(self, embedding: Example) -> Example:
        return embedding

    def test_fifty_reloads_keep_memory_files_and_threads_flat(self, example: Example) -> None:
        if os.environ.get("CI") == "true":
            pytest.skip("it collects garbage beside PyTorch 100 times: 8 s of CPU")
        super().test_fifty_reloads_keep_memory_files_and_threads_flat(example)

    def example_of(self, kind: str, directory: Path) -> Example | None:
        return None  # the tensors are those of the task
