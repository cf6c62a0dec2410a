"""The contract between language models and their protocols: tensors, requests and responses.

It is a library, not a plugin: engines (``headrace-llamacpp``, ``headrace-transformers``, ``headrace-vllm``) and
protocols (``headrace-openai``) depend on it, and not on each other.

- `Contract`, `Task`, `complete_generation`: the tensors (`headrace_llm.contract`)
- `GenerationInstance`, `TokenStream`, `Delta`: for engines
- `GenerationRequest`, `Sampling`: the request of a caller
- `read_json_file`, `shown`: a JSON file of a model; a value in the text of an error
- `read_logprobs`, `print_logprobs`, `token_text`, `token_bytes`, `piece_text`: the form of log probabilities
- `StopStrings`: the end of a text, for engines that do not find it themselves
- `BoundedProcess`, `serve_job`: a job with limits of time and memory, in a process
- `HermesParser`, `ToolCallParser`, `read_calls`: the tool calls in a text, while it arrives
"""

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
from headrace_llm.generation_instance import GenerationInstance, TokenStream
from headrace_llm.generation_request import GenerationRequest, read_generation
from headrace_llm.json_files import read_json_file
from headrace_llm.sampling import Sampling, depth_of, read_sampling, sampling_of, shown
from headrace_llm.stop_strings import StopStrings
from headrace_llm.token_pieces import piece_text
from headrace_llm.tool_calls import HermesParser, ToolCallParser, read_calls

__all__ = [
    "GENERATION_INPUTS",
    "GENERATION_OUTPUTS",
    "TASK",
    "BoundedProcess",
    "Contract",
    "ContractTensor",
    "Delta",
    "GenerationInstance",
    "GenerationRequest",
    "HermesParser",
    "Sampling",
    "StopStrings",
    "Task",
    "TokenLogprob",
    "TokenStream",
    "ToolCallParser",
    "complete_generation",
    "complete_task",
    "depth_of",
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
