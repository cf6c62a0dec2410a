"""llama.cpp itself: opens a model, without a port of its own.

xllamacpp runs the whole server of llama.cpp, with its HTTP port, and calls its handlers. That port would bypass
admission. So it is a Unix socket in a private directory, which is removed as soon as the server listens: no program can
connect. In addition, it requires a random key that is not kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace import BackendError, LoadError, Model
from headrace_engines import threads_per_instance
from headrace_llamacpp.gguf import GgufHeader, read_header
from headrace_llamacpp.parameters import POOLING, Parameters
from headrace_llm import BoundedProcess

log = logging.getLogger("headrace.llamacpp")

#: llama.cpp's log goes to the standard error: only its errors.
_VERBOSITY: Final = 1
#: The longest path of the directory for temporary files that leaves enough for a socket in a directory of it.
_MOST_PATH_BYTES: Final = 64
#: Limits of a second attempt to load a model, which is to say why the first one failed.
_TRIAL_S, _TRIAL_BYTES = 10.0, 512 << 20
#: The largest context of a model whose config has no parameter ``context``, in tokens.
_MOST_CONTEXT: Final = 4096


def load_library() -> Any:
    """Return the module ``xllamacpp``. Raises `LoadError` with the command that installs it."""
    try:
        import xllamacpp
    except ImportError as error:
        raise LoadError(
            f"backend 'llamacpp' needs the package xllamacpp, which cannot be imported ({error}); "
            "run: pip install xllamacpp"
        ) from error
    return xllamacpp


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model, inside its directory. ``adapters`` are in the order of llama.cpp's numbers."""

    weights: Path
    header: GgufHeader
    adapters: Mapping[str, Path]
    projector: Path | None
    chat_template: str


def find_files(model: Model) -> ModelFiles:
    """Return the files that the config of ``model`` names. Raises `LoadError` for one that is missing or outside."""
    parameters: Parameters = model.parameters
    weights = find_weights(model)
    header = read_header(weights)
    adapters = {
        name.removeprefix("lora."): model.resource_or_above(file) for name, file in sorted(parameters.lora.items())
    }
    projector = model.resource_or_above(parameters.mmproj) if parameters.mmproj else None
    for path in (*adapters.values(), *((projector,) if projector else ())):
        read_header(path)
    template = header.chat_template
    if parameters.chat_template:
        template = model.resource_or_above(parameters.chat_template).read_text("utf-8")
    return ModelFiles(weights, header, adapters, projector, template)


def find_weights(model: Model) -> Path:
    """Return the model's file: ``default_model_filename``, else ``model.gguf``, else the one ``.gguf`` there is."""
    name = model.config.default_model_filename
    parameters: Parameters = model.parameters
    if not name and not (model.path / "model.gguf").exists():
        others = {Path(file).name for file in (parameters.mmproj, *parameters.lora.values()) if file}
        found = sorted(path.name for path in model.path.glob("*.gguf") if path.name not in others)
        if len(found) > 1:
            raise LoadError(
                f"model '{model.name}' has {len(found)} files *.gguf in '{model.path}', such as '{found[0]}': set "
                "default_model_filename"
            )
        name = found[0] if found else ""
    return model.resource(name or "model.gguf")


def context_of(parameters: Parameters, header: GgufHeader) -> int:
    """Return the tokens that one request may have."""
    return parameters.context or min(header.context_length or _MOST_CONTEXT, _MOST_CONTEXT)


def open_engine(model: Model, files: ModelFiles) -> Any:
    """Return a running ``xllamacpp.Server``. Raises `LoadError`.

    Deleting the last reference ends it; no handler may be running then.
    """
    library = load_library()
    with private_folder() as folder:
        settings = _settings(library, model, files, f"{folder}/closed.sock")
        try:
            engine = library.Server(settings)
        except RuntimeError as error:
            raise LoadError(
                f"llama.cpp cannot load '{files.weights}' of model '{model.name}', whose architecture is "
                f"'{files.header.architecture[:100]}': {_reason(files.weights) or error}"
            ) from error
        _ask_once(engine, model.parameters.task)
        return engine


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """Return an empty directory, which only this user can open: for a socket, whose path has at most 107 bytes."""
    place = tempfile.gettempdir()
    short = place if len(os.fsencode(place)) <= _MOST_PATH_BYTES else "/tmp"
    return tempfile.TemporaryDirectory(prefix="headrace-llamacpp-", dir=short, ignore_cleanup_errors=True)


def _reason(weights: Path) -> str:
    """Return why llama.cpp cannot load ``weights``; empty if that cannot be found out.

    llama.cpp writes it to the log of the process only. So another one, whose log is read, tries again with limits.
    """
    process = BoundedProcess("headrace_llamacpp.run_templates", _TRIAL_BYTES)
    try:
        with private_folder() as folder:
            answer = process.ask(json.dumps({"file": str(weights), "folder": folder}).encode(), _TRIAL_S)
    except BackendError:
        return ""
    finally:
        process.close()
    return (answer or b"").decode()


def _ask_once(engine: Any, task: str) -> None:
    """Wait for the first answer, which also warms the model up.

    An engine that is deleted before its loop has begun waits for the end of that loop for ever, with Python's lock.
    """
    with contextlib.suppress(RuntimeError, TypeError, ValueError):  # any answer will do
        if task == "embedding":
            engine.handle_embeddings({"input": "a"})
        elif task == "reranking":
            engine.handle_rerank({"query": "a", "documents": ["a"]})
        else:
            engine.handle_completions({"prompt": "a", "n_predict": 1}, lambda chunk: False)


def new_settings(library: Any, weights: str, socket: str) -> Any:
    """Return settings for ``weights`` with no port that can be reached, and no access to other files."""
    settings = library.CommonParams()
    settings.verbosity = _VERBOSITY
    settings.model.path = weights
    settings.hostnames = [socket]
    settings.api_keys = [secrets.token_urlsafe(32)]
    settings.n_threads_http = 1
    settings.endpoint_slots = settings.endpoint_props = settings.endpoint_metrics = settings.ui = False
    settings.offline, settings.warmup = True, False
    settings.sse_ping_interval = -1
    settings.fit_params = False
    return settings


def _settings(library: Any, model: Model, files: ModelFiles, socket: str) -> Any:
    parameters: Parameters = model.parameters
    settings = new_settings(library, str(files.weights), socket)
    context = context_of(parameters, files.header)
    settings.n_parallel, settings.n_ctx = parameters.slots, context * parameters.slots
    settings.n_gpu_layers = parameters.gpu_layers
    settings.cache_ram_mib = parameters.prompt_cache_mib
    threads = parameters.threads or threads_per_instance(model.config, 1)
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    settings.n_batch = settings.n_ubatch = parameters.batch
    if parameters.task in ("embedding", "reranking"):
        settings.embedding = True
        settings.n_batch = settings.n_ubatch = context  # a text is computed at once
        settings.pooling_type = library.llama_pooling_type(
            POOLING["rank" if parameters.task == "reranking" else parameters.pooling]
        )
    if files.projector is not None:
        settings.mmproj.path = str(files.projector)
    if files.adapters:
        settings.lora_adapters = [library.CommonAdapterLoraInfo(str(path), 0.0) for path in files.adapters.values()]
        settings.lora_init_without_apply = True
    if settings.embedding:
        settings.chat_template = "chatml"  # its own, in the place of any program in the file
    elif parameters.chat_template:
        settings.chat_template = files.chat_template
    log.info(
        "model '%s': %d slots with a context of %d tokens, %d threads", model.name, parameters.slots, context, threads
    )
    return settings
