"""The parameters of a model for the backend ``transformers``."""

from __future__ import annotations

from dataclasses import dataclass

from headrace import ConfigError, Model, one_line

DTYPES = ("auto", "float32", "bfloat16", "float16")
POOLINGS = ("", "mean", "cls", "last", "max")
ACTIVATIONS = ("", "none", "sigmoid", "softmax")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one model. 0 or an empty text lets the backend choose."""

    #: A `Task`, if it is not the one of the architecture in ``config.json``.
    task: str = ""
    #: A folder of the version directory that has the model.
    folder: str = ""
    #: The type of the weights in memory. ``auto`` is that of the file.
    dtype: str = "auto"
    #: Run Python code of the model's directory, and read pickled weights. Only for models from people you trust.
    trust: bool = False
    #: Threads within an operator. 0: the cores divided among the CPU instances.
    intra_op_thread_count: int = 0
    #: The implementation of attention: ``eager``, ``sdpa``, ``flash_attention_2`` or another name of transformers.
    attention: str = ""
    #: Compile the model by ``torch.compile``: a slow first request, and faster ones after it.
    compile: bool = False
    #: Generation: requests that an instance has, running and waiting. More are refused.
    max_streams: int = 256
    #: Generation: requests that run at once.
    max_running: int = 16
    #: Generation: use transformers' continuous batching where the model supports it.
    continuous_batching: bool = True
    #: Generation: tokens for which the cache of continuous batching has room, in all requests together.
    cache_tokens: int = 0
    #: Embedding: ``mean``, ``cls``, ``last`` or ``max``; else as in the files of sentence-transformers, or ``mean``.
    pooling: str = ""
    #: Embedding: divide each vector by its length; else as in these files.
    normalize: bool | None = None
    #: Embedding, reranking, classification: tokens of a text; what exceeds them is cut off.
    max_length: int = 0
    #: Reranking, classification: from logits to scores. Else as in ``config.json``.
    activation: str = ""
    #: Transcription: the longest audio, in seconds.
    max_audio_s: int = 3600

    def __post_init__(self) -> None:
        from headrace_llm import Task

        tasks = ("", *(task.value for task in Task))
        for key, value, known in (
            ("task", self.task, tasks),
            ("dtype", self.dtype, DTYPES),
            ("pooling", self.pooling, POOLINGS),
            ("activation", self.activation, ACTIVATIONS),
        ):
            if value not in known:
                expected = ", ".join(each for each in known if each)
                raise _wrong(key, f"is '{one_line(value)}', expected one of {expected}")
        for key, number, least in (
            ("intra_op_thread_count", self.intra_op_thread_count, 0),
            ("max_streams", self.max_streams, 1),
            ("max_running", self.max_running, 1),
            ("cache_tokens", self.cache_tokens, 0),
            ("max_length", self.max_length, 0),
            ("max_audio_s", self.max_audio_s, 1),
        ):
            if not least <= number < 2**31:
                raise _wrong(key, f"is {number}, expected a number from {least} to 2147483647")


def _wrong(key: str, text: str) -> ConfigError:
    return ConfigError(f"parameter '{key}' {text}", field=f"parameters['{key}']")


def is_trusted(model: Model) -> bool:
    """True if ``model`` may run code of its own. Raises `ConfigError` if the parameter comes with a load request."""
    if model.parameters.trust:
        model.refuse_if_sent("parameter 'trust'", "parameters['trust']")
    return bool(model.parameters.trust)


#: The end of an error about something that needs trust.
HOW_TO_TRUST = "if you trust who made it, set the model's parameter 'trust' to 'true'"
