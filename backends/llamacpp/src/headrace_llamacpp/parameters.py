"""The parameters of a model for llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace import ConfigError

#: The tasks of a model, as `headrace_llm.Task` names them.
TASKS = ("", "generation", "embedding", "reranking")
#: llama.cpp's numbers for the ways to make one vector of those of the tokens; empty for the one in the file.
POOLING = {"": -1, "none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one model. Files are in the version's directory, or in the model's."""

    #: Tokens of one request, prompt and answer. 0: what the model was trained with, at most 4,096.
    context: int = 0
    #: Requests that run at once. Each has its own part of the cache.
    slots: int = 4
    #: Requests that are taken, running and waiting. More are refused.
    max_streams: int = 256
    #: Threads that compute. 0: the cores of this process divided among the CPU instances.
    threads: int = 0
    #: Layers on the GPU, for a build of llama.cpp with one. -1: all.
    gpu_layers: int = -1
    #: Tokens of a prompt that are computed at once.
    batch: int = 512
    #: Memory for the caches of prompts whose slot has a new request, in MiB.
    prompt_cache_mib: int = 256
    #: A file with the chat template. Empty: the one in the model.
    chat_template: str = ""
    #: The file of the projector of images, for a model that reads images.
    mmproj: str = ""
    #: Adapters by name: ``lora.<name>`` is a file.
    lora: Mapping[str, str] = field(default_factory=dict, metadata={"prefix": "lora."})
    #: ``generation``, ``embedding`` or ``reranking``. Empty: ``generation``.
    task: str = ""
    #: For ``embedding``: one of `POOLING`.
    pooling: str = ""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("context", 0, 1 << 24),
            ("slots", 1, 1024),
            ("max_streams", 1, 1 << 20),
            ("threads", 0, 512),
            ("gpu_layers", -1, 1 << 16),
            ("batch", 1, 1 << 16),
            ("prompt_cache_mib", 0, 1 << 20),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"parameter '{name}' must be from {least} to {most}, got {value}", field=_field(name))
        for name, known in (("task", TASKS), ("pooling", tuple(POOLING))):
            value = getattr(self, name)
            if value not in known:
                expected = ", ".join(each for each in known if each)
                raise ConfigError(
                    f"parameter '{name}' must be one of {expected}, got '{value[:100]}'", field=_field(name)
                )


def _field(name: str) -> str:
    return f"parameters['{name}']"
