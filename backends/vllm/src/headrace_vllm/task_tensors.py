"""Completes the config of a model from the arguments of vLLM's engine."""

from __future__ import annotations

from typing import Final

from headrace import ConfigError, Model, dtypes
from headrace_llm import ContractTensor, Task, complete_generation, complete_task
from headrace_vllm.engine_arguments import read_engine_arguments, vector_width

_TEXT_OR_TOKENS: Final = (ContractTensor("text", dtypes.BYTES, (1,)), ContractTensor("input_ids", dtypes.INT32, (-1,)))
_PAIR: Final = (ContractTensor("query", dtypes.BYTES, (1,)), ContractTensor("document", dtypes.BYTES, (1,)))
_SCORE: Final = ContractTensor("score", dtypes.FP32, (1,))
_COUNT: Final = ContractTensor("num_input_tokens", dtypes.UINT32, (1,))


def complete(model: Model) -> None:
    """Add all tensors of the contract; for text, decoupled responses and no batch axis. Raises `ConfigError`."""
    config = model.config
    arguments = read_engine_arguments(model)
    if arguments.task is Task.GENERATION:
        complete_generation(config)
        return
    if config.model_transaction_policy.decoupled:
        raise ConfigError(
            f"model '{config.name}' is for {arguments.task.value}, which has one response per request: it cannot "
            "be decoupled",
            field="model_transaction_policy.decoupled",
        )
    if arguments.task is Task.EMBEDDING:
        vector = ContractTensor("embedding", dtypes.FP32, (vector_width(arguments),))
        complete_task(config, Task.EMBEDDING, *_TEXT_OR_TOKENS, vector, _COUNT, inputs=2)
        for io in config.input:
            io.optional = True  # one of the two is there
    else:
        complete_task(config, Task.RERANKING, *_PAIR, _SCORE, _COUNT, inputs=2)
