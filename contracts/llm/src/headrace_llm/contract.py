"""The tensors of models that generate text, and of the other tasks of language models.

The contract for text is that of Triton's vLLM backend (docs/spec/behaviours.md section 10.7): ``text_input`` to
``text_output``, one request without a batch axis, any number of responses. Chats add optional inputs.
A model need not have all of them: `Contract.of` returns those that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from headrace import ConfigError, DataType, ModelConfig, ModelView, Spec, dtypes


@dataclass(frozen=True, slots=True)
class ContractTensor:
    """One tensor of the contract. ``dims`` have no batch axis; -1 is any size."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]


def _tensors(*tensors: tuple[str, DataType, tuple[int, ...]]) -> Mapping[str, ContractTensor]:
    return {name: ContractTensor(name, datatype, dims) for name, datatype, dims in tensors}


#: The inputs of a model that generates text. A request has ``text_input``, ``messages`` or ``input_ids``.
GENERATION_INPUTS: Final = _tensors(
    ("text_input", dtypes.BYTES, (1,)),  # the prompt
    ("stream", dtypes.BOOL, (1,)),  # false, the default: one response with the whole text
    ("sampling_parameters", dtypes.BYTES, (1,)),  # a JSON object; the parameters of the request if it is missing
    ("exclude_input_in_output", dtypes.BOOL, (1,)),  # the default is that of the model's parameters
    ("return_finish_reason", dtypes.BOOL, (1,)),
    ("return_cumulative_logprob", dtypes.BOOL, (1,)),
    ("return_logprobs", dtypes.BOOL, (1,)),
    ("return_num_input_tokens", dtypes.BOOL, (1,)),
    ("return_num_output_tokens", dtypes.BOOL, (1,)),
    ("image", dtypes.BYTES, (-1,)),  # files as base64
    # Beyond Triton's contract:
    ("input_ids", dtypes.INT32, (-1,)),  # the prompt as tokens
    ("messages", dtypes.BYTES, (1,)),  # a JSON array as in OpenAI's chat completions; the model applies its template
    ("tools", dtypes.BYTES, (1,)),  # a JSON array, likewise
    ("tool_choice", dtypes.BYTES, (1,)),  # a JSON value, likewise
    ("return_output_ids", dtypes.BOOL, (1,)),
)
#: Its outputs. A response has those that its request asks for, and ``text_output`` always.
GENERATION_OUTPUTS: Final = _tensors(
    ("text_output", dtypes.BYTES, (-1,)),  # in a stream: the new part
    ("finish_reason", dtypes.BYTES, (-1,)),  # in the last response: stop, length or tool_calls; else None
    ("cumulative_logprob", dtypes.FP32, (-1,)),
    ("logprobs", dtypes.BYTES, (-1,)),  # JSON, see `headrace_llm.deltas`
    ("num_input_tokens", dtypes.UINT32, (1,)),
    ("num_output_tokens", dtypes.UINT32, (-1,)),  # those that are new in this response
    ("output_ids", dtypes.INT32, (-1,)),  # the new tokens
    ("tool_calls", dtypes.BYTES, (-1,)),  # JSON array of deltas as in OpenAI's chat completion chunks; or empty
    ("reasoning", dtypes.BYTES, (-1,)),  # the reasoning before the answer; or empty
)


class Task(Enum):
    """A task of language models. The value is that of the model parameter ``task``."""

    GENERATION = "generation"
    EMBEDDING = "embedding"
    RERANKING = "reranking"
    CLASSIFICATION = "classification"
    TRANSCRIPTION = "transcription"


#: The model parameter that names a `Task`. A model with ``text_input`` and ``text_output`` needs none.
TASK: Final = "task"


@dataclass(frozen=True, slots=True)
class Contract:
    """The task of a model, and the tensors that it has for it.

    ``inputs`` maps the part that a tensor has in the task to the tensor of the model:

    - generation: the names of `GENERATION_INPUTS` that the model has
    - embedding: ``text``, its one input of strings; ``input_ids``, the text as tokens, if it has it
    - reranking: ``query`` and ``document``
    - classification: ``text``
    - transcription: ``audio``, the bytes of a file; ``language``, ``prompt`` and ``temperature`` if it has them

    ``outputs`` likewise: those of `GENERATION_OUTPUTS`; ``embedding``; ``score``; ``label`` and ``score``;
    ``text_output``. Embedding and reranking also have ``num_input_tokens`` if the model has it,
    transcription ``language``, ``duration``, ``segments`` and ``words``.
    """

    task: Task
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]

    @classmethod
    def of(cls, model: ModelView) -> Contract | None:
        """Return the contract of ``model``; None if it declares none.

        Raises `ConfigError` with the name of the tensor if it declares a task and lacks a tensor of it.
        """
        name = model.config.parameters[TASK].string_value if TASK in model.config.parameters else ""
        if not name:
            is_generator = "text_input" in model.inputs and "text_output" in model.outputs
            return _generation(model) if is_generator else None
        try:
            task = Task(name)
        except ValueError:
            known = ", ".join(each.value for each in Task)
            raise ConfigError(
                f"model '{model.name}': parameter '{TASK}' is '{name}', expected one of {known}"
            ) from None
        return _generation(model) if task is Task.GENERATION else _other(model, task)


#: Optional outputs for speech: its language, its duration in s, and a JSON array of ``start``, ``end`` and ``text``,
#: and one of ``start``, ``end`` and ``word``.
_SPEECH = ("language", "duration", "segments", "words")
#: The parts of the tasks beside generation: required inputs, optional ones, required outputs, optional ones.
_PARTS: Mapping[Task, tuple[tuple[str, ...], ...]] = {
    Task.EMBEDDING: (("text",), ("input_ids",), ("embedding",), ("num_input_tokens",)),
    Task.RERANKING: (("query", "document"), (), ("score",), ("num_input_tokens",)),
    Task.CLASSIFICATION: (("text",), (), ("label", "score"), ()),
    Task.TRANSCRIPTION: (("audio",), ("language", "prompt", "temperature"), ("text_output",), _SPEECH),
}


def _generation(model: ModelView) -> Contract:
    for name, tensors in (("text_input", model.inputs), ("text_output", model.outputs)):
        if name not in tensors:
            raise ConfigError(f"model '{model.name}' generates text, but has no tensor '{name}'")
    return Contract(
        Task.GENERATION,
        {name: spec for name, spec in model.inputs.items() if name in GENERATION_INPUTS},
        {name: spec for name, spec in model.outputs.items() if name in GENERATION_OUTPUTS},
    )


def _other(model: ModelView, task: Task) -> Contract:
    required, optional, outputs, more = _PARTS[task]
    found = {name: model.inputs[name] for name in (*required, *optional) if name in model.inputs}
    if len(required) == 1 and required[0] not in found and len(model.inputs) == 1:
        found = dict(zip(required, model.inputs.values(), strict=True))
    given = {name: model.outputs[name] for name in outputs if name in model.outputs}
    if len(outputs) == 1 and not given and len(model.outputs) == 1:
        given = dict(zip(outputs, model.outputs.values(), strict=True))
    for name, tensors in (*((name, found) for name in required), *((name, given) for name in outputs)):
        if name not in tensors:
            raise ConfigError(f"model '{model.name}' is for {task.value}, but has no tensor '{name}'")
    given |= {name: model.outputs[name] for name in more if name in model.outputs}
    return Contract(task, found, given)


def complete_generation(config: ModelConfig, *left_out: str) -> None:
    """Complete ``config`` for a model that generates text: its tensors, decoupled responses and no batch axis.

    ``left_out`` are the tensors of the contract that the model does not have. Tensors that ``config`` names are kept.
    Raises `ConfigError` if ``config`` has a ``max_batch_size`` above 0.
    """
    if config.max_batch_size > 0:
        raise ConfigError(
            f"model '{config.name}' generates text: max_batch_size must be 0, got {config.max_batch_size}. Its engine "
            "forms the batches",
            field="max_batch_size",
        )
    config.model_transaction_policy.decoupled = True
    given = {*(io.name for io in config.input), *(io.name for io in config.output), *left_out}
    for tensor in GENERATION_INPUTS.values():
        if tensor.name not in given:
            kind, dims = tensor.datatype.config_value, tensor.dims
            config.input.add(name=tensor.name, data_type=kind, dims=dims, optional=True)
    for tensor in GENERATION_OUTPUTS.values():
        if tensor.name not in given:
            config.output.add(name=tensor.name, data_type=tensor.datatype.config_value, dims=tensor.dims)


def complete_task(config: ModelConfig, task: Task, *tensors: ContractTensor, inputs: int) -> None:
    """Complete ``config`` for ``task``: its parameter ``task`` and its tensors. The first ``inputs`` are inputs."""
    if not config.parameters[TASK].string_value:
        config.parameters[TASK].string_value = task.value
    for place, tensor in enumerate(tensors):
        ios = config.input if place < inputs else config.output
        if not any(io.name == tensor.name for io in ios):
            ios.add(name=tensor.name, data_type=tensor.datatype.config_value, dims=tensor.dims)
