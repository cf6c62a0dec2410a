"""The backend ``transformers``: completes configs, and loads models of each task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace import (
    AnyInstance,
    Backend,
    DeferredInstance,
    Instance,
    Model,
    ModelConfig,
    RequestInstance,
    Shared,
    dtypes,
    parse_parameters,
)
from headrace_transformers.parameters import Parameters

if TYPE_CHECKING:
    from headrace_transformers.transformers_engine import OpenedTransformer


class Transformers(Backend):
    """Serves a directory in the form of Hugging Face, or a GGUF file."""

    name = "transformers"
    Parameters = Parameters
    devices = ("gpu", "cpu")
    dtypes = (dtypes.BYTES, dtypes.BOOL, dtypes.INT32, dtypes.UINT32, dtypes.FP32)
    hardware = "it has run on an NVIDIA H100 (transformers 5.24, PyTorch 2.11, CUDA 13.0)"
    instance_classes = (Instance, RequestInstance, DeferredInstance)
    engine_fields = ()

    def complete_config(self, model: Model) -> None:
        from headrace_transformers.model_files import find_files
        from headrace_transformers.tasks import complete_config

        complete_config(model.config, find_files(model))

    def share(self, model: Model) -> Shared[str, OpenedTransformer]:
        """Weights by device, for the instances of all tasks but generation, which needs one instance per device."""
        return Shared()

    def unshare(self, shared: Shared[str, OpenedTransformer]) -> None:
        from headrace_transformers.transformers_engine import release_memory

        if shared.made:
            shared.close()
            release_memory()

    def repository_code(self, config: ModelConfig) -> str:
        is_code = parse_parameters(Parameters, config.parameters).trust
        return "the code of its directory (parameter 'trust')" if is_code else ""

    def load(self, model: Model) -> AnyInstance:
        from headrace_engines import set_torch_threads
        from headrace_llm import Task
        from headrace_transformers.encoders import Classifier, Embedder, Reranker
        from headrace_transformers.generation import TransformersGenerator
        from headrace_transformers.model_files import find_files
        from headrace_transformers.transcription import Transcriber
        from headrace_transformers.transformers_engine import open_model, threads_of
        from headrace_transformers.transformers_library import load_engine

        files = find_files(model)
        load_engine()
        import torch

        set_torch_threads(torch, threads_of(model))
        if files.task is Task.GENERATION:
            return TransformersGenerator(model, open_model(model, files))
        device = f"{model.device.kind}:{model.device.id}"
        opened = model.shared.get(device, lambda: open_model(model, files))
        if files.task is Task.EMBEDDING:
            return Embedder(model, opened)
        if files.task is Task.RERANKING:
            return Reranker(model, opened)
        return Classifier(model, opened) if files.task is Task.CLASSIFICATION else Transcriber(model, opened)
