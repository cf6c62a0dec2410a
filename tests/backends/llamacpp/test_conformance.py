"""The published kit, on a tiny model that makes embeddings, with llama.cpp itself as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xllamacpp

from headrace_testing import BackendConformance, Example
from tests.backends.llamacpp.gguf_files import write_tiny

WORDS = "The cat sleeps."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "1"
    folder.mkdir()
    write_tiny(folder / "model.gguf")
    return folder


@pytest.fixture(scope="module")
def embedding(files: Path) -> Any:
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.verbosity = str(files / "model.gguf"), 0
    settings.hostnames = [str(files.parent / "e.sock")]
    settings.embedding, settings.pooling_type = True, xllamacpp.llama_pooling_type(1)
    settings.n_parallel, settings.n_ctx, settings.cache_ram_mib = 1, 256, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    found: Any = xllamacpp.Server(settings).handle_embeddings({"input": WORDS})
    return np.array(found["data"][0]["embedding"], np.float32)


class TestLlamaCpp(BackendConformance):
    plugin, backend, heavy = "headrace_llamacpp", "llamacpp", ("xllamacpp", "llguidance")

    @pytest.fixture
    def example(self, files: Path, embedding: Any) -> Example:
        settings = {"task": "embedding", "pooling": "mean", "context": "64", "slots": "1", "threads": "1"}
        outputs = {"embedding": embedding, "num_input_tokens": np.array([len(WORDS) + 2], np.uint32)}
        inputs = {"text": np.array([WORDS], object)}
        return Example(files, inputs, outputs, {**settings, "isolation": "thread"}, "model.gguf", batched=False)
