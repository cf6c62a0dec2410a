"""The config of a model of each task: its tensors, and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace import ConfigError, ModelConfig, dtypes
from headrace_llm import ContractTensor, Task, complete_generation, complete_task
from headrace_transformers.model_files import HuggingFaceFiles, number_of_labels

DEFAULT_MAX_BATCH_SIZE = 32
_COUNT = ContractTensor("num_input_tokens", dtypes.UINT32, (1,))


def complete_config(config: ModelConfig, files: HuggingFaceFiles) -> None:
    """Complete ``config`` for the task of ``files``. Raises `ConfigError`."""
    task = files.task
    if task is Task.GENERATION:
        complete_generation(config, "reasoning", *(() if files.reads_images else ("image",)))
        return
    if config.model_transaction_policy.decoupled:
        raise ConfigError(
            f"model '{config.name}' is for {task.value}, which has one response per request: it cannot be decoupled",
            field="model_transaction_policy.decoupled",
        )
    inputs, outputs = _tensors(task, files.config)
    if config.output:  # the config names its outputs
        outputs = []
    complete_task(config, task, *inputs, *outputs, inputs=len(inputs))
    for io in config.input:
        io.optional = io.optional or (task is Task.TRANSCRIPTION and io.name in ("language", "prompt", "temperature"))
    if config.max_batch_size == 0:
        config.max_batch_size = DEFAULT_MAX_BATCH_SIZE
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()


def _tensors(task: Task, config: Mapping[str, Any]) -> tuple[list[ContractTensor], list[ContractTensor]]:
    text, labels = dtypes.BYTES, number_of_labels(config) if config else -1
    if task is Task.EMBEDDING:
        vector = ContractTensor("embedding", dtypes.FP32, (_width(config),))
        return [ContractTensor("text", text, (1,))], [vector, _COUNT]
    if task is Task.RERANKING:
        pair = [ContractTensor("query", text, (1,)), ContractTensor("document", text, (1,))]
        return pair, [ContractTensor("score", dtypes.FP32, (1,)), _COUNT]
    if task is Task.CLASSIFICATION:
        given = [ContractTensor("label", text, (labels,)), ContractTensor("score", dtypes.FP32, (labels,))]
        return [ContractTensor("text", text, (1,))], given
    inputs = [ContractTensor(name, text, (1,)) for name in ("audio", "language", "prompt")]
    outputs = [ContractTensor(name, text, (1,)) for name in ("text_output", "language", "segments", "words")]
    numbers = (ContractTensor(name, dtypes.FP32, (1,)) for name in ("temperature", "duration"))
    return [*inputs, next(numbers)], [*outputs, *numbers]


def _width(config: Mapping[str, Any]) -> int:
    for name in ("hidden_size", "d_model", "n_embd", "dim"):
        if type(config.get(name)) is int:
            return int(config[name])
    return -1
