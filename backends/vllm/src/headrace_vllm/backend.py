"""The backend ``vllm``: completes and checks the config, and makes instances."""

from __future__ import annotations

from typing import Final

from headrace import Backend, ConfigError, DeferredInstance, Model, ModelConfig, dtypes, parse_parameters
from headrace_llm import ContractTensor, Task, complete_generation, complete_task
from headrace_vllm.engine_arguments import read_engine_arguments, vector_width
from headrace_vllm.instance import VLLMInstance
from headrace_vllm.parameters import Parameters
from headrace_vllm.pooling_instance import PoolingInstance

_TEXT_OR_TOKENS: Final = (ContractTensor("text", dtypes.BYTES, (1,)), ContractTensor("input_ids", dtypes.INT32, (-1,)))
_PAIR: Final = (ContractTensor("query", dtypes.BYTES, (1,)), ContractTensor("document", dtypes.BYTES, (1,)))
_SCORE: Final = ContractTensor("score", dtypes.FP32, (1,))
_COUNT: Final = ContractTensor("num_input_tokens", dtypes.UINT32, (1,))


class VLLM(Backend):
    """Serves ``<version>/model.json``, the arguments of vLLM's engine, or the Hugging Face model in ``<version>``."""

    name = "vllm"
    Parameters = Parameters
    devices = ("gpu", "cpu")
    hardware = "it has never run on a GPU; its tests use vLLM's build for CPUs"
    rungs = (DeferredInstance,)
    engine_fields = ()

    def complete_config(self, model: Model) -> None:
        """All tensors of the contract; for text, decoupled responses and no batch axis."""
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

    def repository_code(self, config: ModelConfig) -> str:
        """The Python files of a model with the parameter ``trust``."""
        is_code = parse_parameters(Parameters, config.parameters).trust
        return "the Python files of the model (parameter 'trust')" if is_code else ""

    def load(self, model: Model) -> VLLMInstance | PoolingInstance:
        arguments = read_engine_arguments(model)
        if arguments.task is Task.GENERATION:
            return VLLMInstance(model, arguments)
        return PoolingInstance(model, arguments, arguments.task)
