"""Models opened by transformers, on their devices. It never uses the network."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace import BackendError, Code, HeadraceError, LoadError, Model, one_line
from headrace_engines import threads_beside_server
from headrace_llm import Task
from headrace_transformers.adapters import adapter_folders, open_adapters
from headrace_transformers.model_files import HuggingFaceFiles, check_weights
from headrace_transformers.parameters import HOW_TO_TRUST, is_trusted
from headrace_transformers.transformers_library import load_engine

log = logging.getLogger("headrace.transformers")

#: Held while a model is opened: ``from_pretrained`` replaces functions of modules meanwhile, for all threads. Of two at
#: once, one may lose its tied weights.
_opening = threading.Lock()

#: The class that opens the models of a task, and of models that read a text and write another.
_CLASSES = {
    Task.GENERATION: "AutoModelForCausalLM",
    Task.EMBEDDING: "AutoModel",
    Task.RERANKING: "AutoModelForSequenceClassification",
    Task.CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.TRANSCRIPTION: "AutoModelForSpeechSeq2Seq",
}


@dataclass(slots=True)
class OpenedTransformer:
    """A model in memory, on ``device``. ``config`` is that of transformers. It may be shared by instances."""

    transformers: Any
    torch: Any
    files: HuggingFaceFiles
    model: Any
    tokenizer: Any
    device: str
    is_encoder_decoder: bool
    #: The same model with an adapter, by the adapter's name.
    adapters: Mapping[str, Any]
    #: The processor of a model that reads images.
    processor: Any = None
    #: Held while the tokenizer is used: it raises if two threads change its padding at once.
    tokenizing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def config(self) -> Any:
        return self.model.config

    def context(self) -> int:
        """Return the most tokens that the model can read; 0 if it has no limit."""
        text = self.config.get_text_config()
        for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"):
            limit = getattr(text, name, None)
            if type(limit) is int and limit > 0:
                return limit
        return 0


def open_model(model: Model, files: HuggingFaceFiles) -> OpenedTransformer:
    """Open ``model`` on its device. Raises `LoadError` with what is wrong."""
    transformers = load_engine()
    import torch

    device = device_of(torch, model)
    numbers = check_weights(model, files)
    folders = adapter_folders(model, files.folder, files.task)
    source: dict[str, Any] = {"gguf_file": files.gguf} if files.gguf else {}
    common = {**source, "local_files_only": True, "trust_remote_code": is_trusted(model)}
    with _opening, _reworded(model, files):
        config = transformers.AutoConfig.from_pretrained(files.folder, **common)
        kind = _class_of(transformers, files, config)
        if numbers and not getattr(config, "quantization_config", None):
            _check_size(torch, kind, config, numbers, files)
        attention = {"attn_implementation": model.parameters.attention} if model.parameters.attention else {}
        opened, found = kind.from_pretrained(
            files.folder,
            config=config,
            dtype=_dtype(torch, model, files),
            use_safetensors=None if source else not is_trusted(model) or None,
            output_loading_info=True,
            **attention,
            **common,
        )
        if missing := sorted(found["missing_keys"]):
            raise LoadError(
                f"{files.folder} has no weights for {one_line(missing[0])} and {len(missing) - 1} other tensors of "
                f"{type(opened).__name__}: is '{files.task.value}' the task of this model?"
            )
        processor = open_processor(transformers, files, common) if files.reads_images else None
        if processor is not None:
            tokenizer = processor.tokenizer
        elif files.task is not Task.TRANSCRIPTION:
            tokenizer = open_tokenizer(transformers, model, files, common)
        else:
            tokenizer = None
        opened = opened.to(device).eval()
        adapters = open_adapters(opened, folders)
        if model.parameters.compile:
            opened.forward = torch.compile(opened.forward, dynamic=True)
    if files.gguf:
        release_memory()  # the buffers of the reader are as large as the weights
    log.info("model '%s': opened %s with %s", model.name, type(opened).__name__, transformers.__version__)
    return OpenedTransformer(
        transformers,
        torch,
        files,
        opened,
        tokenizer,
        device,
        bool(getattr(config, "is_encoder_decoder", False)),
        adapters,
        processor,
    )


def open_tokenizer(transformers: Any, model: Model, files: HuggingFaceFiles, common: Mapping[str, Any]) -> Any:
    """Return the tokenizer of ``model``. Raises `LoadError` if it has none."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model", "tokenizer_config.json")
    if not files.gguf and not any((files.folder / name).exists() for name in names):
        raise LoadError(f"no tokenizer (tokenizer.json) in {files.folder} for model '{model.name}'")
    return transformers.AutoTokenizer.from_pretrained(files.folder, **common)


def open_processor(transformers: Any, files: HuggingFaceFiles, common: Mapping[str, Any]) -> Any:
    """Return the processor of images and text of the model in ``files``. Raises `LoadError` if it has none."""
    processor = transformers.AutoProcessor.from_pretrained(files.folder, **common)
    if not all(hasattr(processor, name) for name in ("image_processor", "tokenizer")):
        raise LoadError(f"{files.folder} has no processor of images and text: it is a {type(processor).__name__}")
    return processor


def _class_of(transformers: Any, files: HuggingFaceFiles, config: Any) -> Any:
    task = files.task
    if files.has_vision and type(config) in transformers.AutoModelForImageTextToText._model_mapping:
        return transformers.AutoModelForImageTextToText
    if task is Task.GENERATION and getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForSeq2SeqLM
    return getattr(transformers, _CLASSES[task])


def _dtype(torch: Any, model: Model, files: HuggingFaceFiles) -> Any:
    asked = model.parameters.dtype
    if asked == "auto":
        return torch.float32 if files.gguf and model.device.kind != "gpu" else "auto"
    return getattr(torch, asked)


def _check_size(torch: Any, kind: Any, config: Any, numbers: int, files: HuggingFaceFiles) -> None:
    """Raise `LoadError` if ``config`` describes a model that is far larger than its weights."""
    with torch.device("meta"):
        described = kind.from_config(config)
    total = sum(parameter.numel() for parameter in described.parameters())
    if total > 4 * numbers + (16 << 20):
        raise LoadError(
            f"{files.folder / 'config.json'} describes a model of {total} numbers, but its weights have {numbers}"
        )


@contextmanager
def _reworded(model: Model, files: HuggingFaceFiles) -> Iterator[None]:
    """Convert exceptions of transformers to `LoadError` with the model and its folder."""
    try:
        yield
    except (LoadError, MemoryError):
        raise
    except ImportError as error:
        raise LoadError(f"model '{model.name}' needs a package that is not installed: {one_line(str(error))[:500]}",
                        Code.UNSUPPORTED) from error  # fmt: skip
    except Exception as error:
        text = one_line(" ".join(str(error).split()))[:500]
        if "trust_remote_code" in text:
            text = f"it runs code of its own: {HOW_TO_TRUST}"
        raise LoadError(
            f"unable to load model '{model.name}' from {files.folder}: {type(error).__name__}: {text}"
        ) from error


def device_of(torch: Any, model: Model) -> str:
    """Return PyTorch's name for ``model.device``. Raises `LoadError` for a GPU that is not there."""
    if model.device.kind != "gpu":
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if model.device.id >= count:
        raise LoadError(
            f"model '{model.name}': instance '{model.instance_name}' is to run on GPU {model.device.id}, but PyTorch "
            f"{torch.__version__} finds {count} GPUs"
        )
    return f"cuda:{model.device.id}"


def threads_of(model: Model) -> int:
    """Return the threads within an operator of ``model``."""
    return int(model.parameters.intra_op_thread_count) or threads_beside_server(model.config, 1)


def release_memory() -> None:
    """Return the memory of deleted models to the system and to GPUs. Any thread. Modules are in reference cycles."""
    from headrace import release_memory as release

    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    release()


@contextmanager
def reworded_execution() -> Iterator[None]:
    """Convert exceptions of transformers during an execution to `BackendError`."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        text = one_line(" ".join(str(error).split()))[:500]
        raise BackendError(f"transformers failed: {type(error).__name__}: {text}", Code.INTERNAL) from error
