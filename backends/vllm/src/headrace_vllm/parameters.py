"""The parameters of a model for vLLM. Those in capitals are of Triton's vLLM backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from headrace_llm import Task

#: The tasks of `Parameters.task`.
TASKS: Final = (Task.GENERATION.value, Task.EMBEDDING.value, Task.RERANKING.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one model. The arguments of the engine stand in ``model.json``, not here."""

    #: Put vLLM's own metrics (``vllm:*``) on the server's page.
    report_custom_metrics: bool = field(default=False, metadata={"key": "REPORT_CUSTOM_METRICS"})
    #: Read for compatibility with Triton, without an effect: the engine is always watched.
    enable_vllm_health_check: bool = field(default=True, metadata={"key": "ENABLE_VLLM_HEALTH_CHECK"})
    #: The GPUs of a model of ``KIND_MODEL``, such as ``0,1``. Empty: all GPUs of the server.
    gpu_device_ids: str = field(default="", metadata={"key": "GPU_DEVICE_IDS"})
    #: The most requests that the engine has at once, running or waiting. More are refused.
    max_streams: int = 256
    #: A file with the template for chats, in the version's directory or the model's. Empty: the model's own. For a
    #: model that ranks documents: of its prompt, from messages of the roles ``query`` and ``document``.
    chat_template: str = ""
    #: vLLM's parser of tool calls for this model, such as ``hermes``. Empty: requests with tools are refused.
    tool_parser: str = ""
    #: vLLM's parser of the model's reasoning, such as ``qwen3``. Empty: the reasoning stays in the text.
    reasoning_parser: str = ""
    #: generation, embedding or reranking. Empty: generation; embedding if ``model.json`` has ``"runner": "pooling"``.
    task: str = ""
    #: Let the model's directory bring Python code (``trust_remote_code``). Only for files from people you trust.
    trust: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_streams <= 1 << 20:
            raise ValueError(f"max_streams is {self.max_streams}, expected a whole number from 1 to {1 << 20}")
        if self.task not in ("", *TASKS):
            raise ValueError(f"task is '{self.task}', expected one of {', '.join(TASKS)}")
        gpus = self.gpu_device_ids.split(",") if self.gpu_device_ids else []
        numbers = [each.strip() for each in gpus]
        if not all(each.isascii() and each.isdigit() for each in numbers):
            raise ValueError(
                f"GPU_DEVICE_IDS is '{self.gpu_device_ids}', expected numbers of GPUs with commas between them, "
                "such as 0,1"
            )
        if len({*map(int, numbers)}) < len(numbers):
            raise ValueError(f"GPU_DEVICE_IDS is '{self.gpu_device_ids}', which names a GPU twice")

    @property
    def gpus(self) -> tuple[int, ...]:
        """The numbers in ``GPU_DEVICE_IDS``."""
        return tuple(int(each) for each in self.gpu_device_ids.split(",") if each.strip())
