"""A model that generates text, and the requests to it. `headrace_openai.text_responses` reads the responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from headrace import BytesTensor, InferRequest, ModelView, Spec, Tensor
from headrace_llm import Contract
from headrace_openai.body_members import encoded
from headrace_openai.chat_templates import ChatTemplate, parser_name
from headrace_openai.openai_errors import BadMember
from headrace_openai.tool_call_parsers import PARSERS

#: Outputs that a caller requests by an input of the model: ``return_`` and their name.
_ALWAYS_ASKED = ("finish_reason", "num_input_tokens", "num_output_tokens")
_ASK = "return_"
#: A seed is from minus this number to one less than it.
_SEEDS = 2**63


@dataclass(slots=True)
class Prompt:
    """The prompt of a request: exactly one of ``text``, ``ids`` and ``messages``. The last two fields are JSON."""

    text: str | None = None
    ids: Sequence[int] | None = None
    messages: bytes | None = None
    images: Sequence[bytes] = ()
    tools: bytes = b""
    tool_choice: bytes = b""


@dataclass(slots=True)
class TextRequest:
    """A request for a text, to one model: all of it but the number of the choice."""

    prompt: Prompt
    sampling: Mapping[str, Any]
    stream: bool
    priority: int = 0
    deadline_ns: int = 0


class TextModel:
    """The inputs and outputs of one version. Made at the first request to the version. Event loop only."""

    def __init__(self, view: ModelView, contract: Contract, template: ChatTemplate | None) -> None:
        self._view = view
        self._inputs = {name: _shape(spec, view.max_batch_size) for name, spec in contract.inputs.items()}
        self.template = template
        self.tool_call_parser = PARSERS.get(parser_name(view.config))
        self.inputs = frozenset(contract.inputs)
        self.outputs = frozenset(contract.outputs)
        wanted = [f"{_ASK}{name}" for name in _ALWAYS_ASKED if name in self.outputs]
        flags = {name: True for name in wanted if name in self.inputs}
        if "exclude_input_in_output" in self.inputs:
            flags["exclude_input_in_output"] = True
        self._fixed = {
            stream: {
                name: np.full(self._inputs[name], value, np.bool_)
                for name, value in (*flags.items(), ("stream", stream))
                if name in self.inputs
            }
            for stream in (True, False)
        }

    @property
    def name(self) -> str:
        return self._view.name

    def request(self, wanted: TextRequest, prompt: Mapping[str, Tensor], request_id: str, number: int) -> InferRequest:
        """Return the request for choice ``number``, with the inputs for its ``prompt``.

        Raises `BadMember` for what the model can not do.
        """
        sampling = dict(wanted.sampling)
        if number and "seed" in sampling:
            sampling["seed"] = (sampling["seed"] + number + _SEEDS) % (2 * _SEEDS) - _SEEDS
        inputs: dict[str, Tensor] = {**self._fixed[wanted.stream], **prompt}
        parameters: dict[str, Any] = {}
        if "logprobs" in sampling:
            self._need("logprobs", "logprobs", "logprobs" in self.outputs)
            if f"{_ASK}logprobs" in self.inputs:
                inputs[f"{_ASK}logprobs"] = np.full(self._inputs[f"{_ASK}logprobs"], True, np.bool_)
        if "sampling_parameters" in self.inputs:
            inputs["sampling_parameters"] = self._string("sampling_parameters", encoded(sampling, "the body"))
        else:
            parameters = {name: _as_parameter(value) for name, value in sampling.items()}
            self._need("response_format", "structured output", "structured_outputs" not in sampling)
            self._need("model", "adapters", "lora_name" not in sampling)
        request = InferRequest(
            self.name, inputs, id=request_id, parameters=parameters, priority=wanted.priority
        )  # fmt: skip
        if wanted.deadline_ns:
            request.expire_at(wanted.deadline_ns)
        return request

    def prompt_inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        """Return the inputs for ``prompt``. Raises `BadMember` for what the model can not do. Any thread."""
        if prompt.ids is not None:
            self._need("prompt", "prompts of tokens", "input_ids" in self.inputs)
            shape = (1, len(prompt.ids)) if self._view.max_batch_size else (len(prompt.ids),)
            return {"input_ids": np.array(prompt.ids, np.int32).reshape(shape)}
        found: dict[str, Tensor] = {}
        if prompt.messages is not None:
            found["messages"] = self._string("messages", prompt.messages)
        else:
            found["text_input"] = self._string("text_input", encoded(prompt.text, "prompt"))
        if prompt.images:
            self._need("messages", "images", "image" in self.inputs)
            shape = (1, len(prompt.images)) if self._view.max_batch_size else (len(prompt.images),)
            found["image"] = BytesTensor.from_items(prompt.images, shape)
        if prompt.tools:
            found["tools"] = self._string("tools", prompt.tools)
        if prompt.tool_choice and "tool_choice" in self.inputs:
            found["tool_choice"] = self._string("tool_choice", prompt.tool_choice)
        return found

    def _string(self, name: str, value: bytes) -> BytesTensor:
        return BytesTensor.from_items([value], self._inputs[name])

    def _need(self, param: str, what: str, has_it: bool) -> None:
        if not has_it:
            raise BadMember(param, f"model '{self.name}' has no {what}")


def _shape(spec: Spec, max_batch_size: int) -> tuple[int, ...]:
    """Return the shape of one element for the input ``spec``."""
    dims = tuple(max(dim, 1) for dim in spec.dims)
    return (1, *dims) if max_batch_size else dims


def _as_parameter(value: Any) -> str | int | bool | float:
    return value if isinstance(value, str | int | bool | float) else orjson.dumps(value).decode()
