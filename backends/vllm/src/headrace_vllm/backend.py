"""The backend ``vllm``: completes and checks the config, and makes instances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace import Backend, DeferredInstance, Model, ModelConfig, parse_parameters
from headrace_vllm.parameters import Parameters

if TYPE_CHECKING:
    from headrace_vllm.instance import VLLMInstance
    from headrace_vllm.pooling_instance import PoolingInstance


class VLLM(Backend):
    """Serves ``<version>/model.json``, the arguments of vLLM's engine, or the Hugging Face model in ``<version>``."""

    name = "vllm"
    Parameters = Parameters
    devices = ("gpu", "cpu")
    hardware = "it has never run on a GPU; its tests use vLLM's build for CPUs"
    instance_classes = (DeferredInstance,)
    engine_fields = ()

    def complete_config(self, model: Model) -> None:
        """Add all tensors of the contract; for text, decoupled responses and no batch axis."""
        from headrace_vllm.task_tensors import complete

        complete(model)

    def repository_code(self, config: ModelConfig) -> str:
        """Return the name of the Python files of a model with the parameter ``trust``; empty without it."""
        is_code = parse_parameters(Parameters, config.parameters).trust
        return "the Python files of the model (parameter 'trust')" if is_code else ""

    def load(self, model: Model) -> VLLMInstance | PoolingInstance:
        from headrace_llm import Task
        from headrace_vllm.engine_arguments import read_engine_arguments
        from headrace_vllm.instance import VLLMInstance
        from headrace_vllm.pooling_instance import PoolingInstance

        arguments = read_engine_arguments(model)
        if arguments.task is Task.GENERATION:
            return VLLMInstance(model, arguments)
        return PoolingInstance(model, arguments, arguments.task)
