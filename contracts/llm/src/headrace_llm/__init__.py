"""The contract between language models and their protocols: tensors, requests and responses.

It is a library, not a plugin: engines (``headrace-llamacpp``, ``headrace-transformers``, ``headrace-vllm``) and
protocols (``headrace-openai``) depend on it, and not on each other.

- `Contract`, `Task`, `complete_generation`: the tensors (`headrace_llm.contract`)
- `GenerationInstance`, `TokenStream`, `Delta`: for engines
- `GenerationRequest`, `Sampling`: the request of a caller
- `read_json_file`, `shown`: a JSON file of a model; a value in the text of an error
- `read_logprobs`, `print_logprobs`, `token_text`, `token_bytes`, `piece_text`: the form of log probabilities
- `ImageBudget`, `images_in`: the images of a request, bounded before they are decoded
- `StopStrings`: the end of a text, for engines that do not find it themselves
- `BoundedProcess`, `serve_job`: a job with limits of time and memory, in a process
- `HermesParser`, `ToolCallParser`, `read_calls`: the tool calls in a text, while it arrives
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace_llm.bounded_process import BoundedProcess, serve_job
    from headrace_llm.contract import (
        GENERATION_INPUTS,
        GENERATION_OUTPUTS,
        TASK,
        Contract,
        ContractTensor,
        Task,
        complete_generation,
        complete_task,
    )
    from headrace_llm.deltas import Delta, TokenLogprob, print_logprobs, read_logprobs, token_bytes, token_text
    from headrace_llm.generation_instance import GenerationInstance
    from headrace_llm.generation_request import GenerationRequest, read_generation
    from headrace_llm.image_budget import IMAGE_FORMS, MAX_IMAGE_PIXELS, ImageBudget, base64_of, image_size, images_in
    from headrace_llm.json_files import read_json_file
    from headrace_llm.sampling import Sampling, depth_of, read_sampling, sampling_of, shown
    from headrace_llm.stop_strings import StopStrings
    from headrace_llm.token_pieces import piece_text
    from headrace_llm.token_stream import TokenStream
    from headrace_llm.tool_calls import HermesParser, ToolCallParser, read_calls

#: The module of each name, imported on first use: a protocol without a model needs few of them.
_HOMES = {
    "bounded_process": ("BoundedProcess", "serve_job"),
    "contract": (
        "GENERATION_INPUTS",
        "GENERATION_OUTPUTS",
        "TASK",
        "Contract",
        "ContractTensor",
        "Task",
        "complete_generation",
        "complete_task",
    ),
    "deltas": ("Delta", "TokenLogprob", "print_logprobs", "read_logprobs", "token_bytes", "token_text"),
    "generation_instance": ("GenerationInstance",),
    "generation_request": ("GenerationRequest", "read_generation"),
    "image_budget": ("IMAGE_FORMS", "MAX_IMAGE_PIXELS", "ImageBudget", "base64_of", "image_size", "images_in"),
    "json_files": ("read_json_file",),
    "sampling": ("Sampling", "depth_of", "read_sampling", "sampling_of", "shown"),
    "stop_strings": ("StopStrings",),
    "token_pieces": ("piece_text",),
    "token_stream": ("TokenStream",),
    "tool_calls": ("HermesParser", "ToolCallParser", "read_calls"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "GENERATION_INPUTS",
    "GENERATION_OUTPUTS",
    "IMAGE_FORMS",
    "MAX_IMAGE_PIXELS",
    "TASK",
    "BoundedProcess",
    "Contract",
    "ContractTensor",
    "Delta",
    "GenerationInstance",
    "GenerationRequest",
    "HermesParser",
    "ImageBudget",
    "Sampling",
    "StopStrings",
    "Task",
    "TokenLogprob",
    "TokenStream",
    "ToolCallParser",
    "base64_of",
    "complete_generation",
    "complete_task",
    "depth_of",
    "image_size",
    "images_in",
    "piece_text",
    "print_logprobs",
    "read_calls",
    "read_generation",
    "read_json_file",
    "read_logprobs",
    "read_sampling",
    "sampling_of",
    "serve_job",
    "shown",
    "token_bytes",
    "token_text",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headrace_llm' has no attribute '{name}'")
    value = getattr(import_module(f"headrace_llm.{_HOME[name]}"), name)
    globals()[name] = value
    return value
