"""The backend ``vllm`` of Headrace: language models, run by vLLM.

A model is a directory with a version in it, and the version holds ``model.json``, the arguments of vLLM's engine, as
for Triton's vLLM backend::

    models/chat/1/model.json      {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "gpu_memory_utilization": 0.5}
    models/chat/config.pbtxt      backend: "vllm"

Or the version holds the model itself, a directory of Hugging Face with ``config.json``. `headrace_vllm.parameters`
lists what the config may say; docs/text-generation.md has the inputs and outputs.
"""

from __future__ import annotations

from headrace import Backend, hookimpl
from headrace_vllm.backend import VLLM
from headrace_vllm.parameters import Parameters

__all__ = ["VLLM", "Parameters"]


@hookimpl
def register_backends() -> list[type[Backend]]:
    """`VLLM`; vLLM itself is imported when a model needs it."""
    return [VLLM]
