"""From an inference request to a request for text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import numpy as np
import orjson

from headrace import BytesTensor, InferRequest, InvalidArgument
from headrace_llm.sampling import (
    MAX_CONSTRAINT_DEPTH,
    SAMPLING_MEMBERS,
    Sampling,
    depth_of,
    read_sampling,
    sampling_of,
    shown,
    whole_number,
)

#: The most tokens of ``input_ids``, and the most messages and tools.
MAX_INPUT_IDS, MAX_MESSAGES, MAX_TOOLS, MAX_IMAGES = 1 << 20, 4096, 128, 64
#: The most values in the JSON of an input, roughly. Parsing holds the interpreter's lock: for 1 s with 10 MB of ``{}``.
MAX_JSON_VALUES = 1 << 19

DEFAULT_MAX_TOKENS = 16
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for text, checked.

    The prompt is exactly one of ``text``, ``input_ids`` (never empty) and ``messages`` (never empty); the others are
    None. ``messages`` and ``tools`` are JSON values as in OpenAI's chat completions: an engine checks what it uses.
    ``tool_choice`` is None, ``auto``, ``none``, ``required``, or an object whose ``function`` has the name of one of
    ``tools``. ``images`` are files as base64, beside ``text`` only. The ``wants_`` fields are the outputs that the
    caller requests. ``echoes_prompt``: the one response begins with the prompt.

    ``priority`` is that of `InferRequest`: 1 is the highest, 0 the default. ``deadline_ns`` is the end of the time for
    the answer, on the monotonic clock; 0 for none. `TokenStream` ends the answer then. An engine may use both to order
    its work.
    """

    id: str
    text: str | None
    input_ids: Sequence[int] | None
    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: Any
    images: Sequence[bytes]
    sampling: Sampling
    stream: bool
    echoes_prompt: bool
    wants_finish_reason: bool
    wants_cumulative_logprob: bool
    wants_logprobs: bool
    wants_num_input_tokens: bool
    wants_num_output_tokens: bool
    wants_output_ids: bool
    priority: int
    deadline_ns: int

    @property
    def max_tokens(self) -> int | None:
        """The most tokens to generate.

        The default is 16 for a prompt, as in vLLM and OpenAI. For a chat it is None: the answer goes on until the model
        ends it, or its context is full.
        """
        return self.sampling.max_tokens or (DEFAULT_MAX_TOKENS if self.messages is None else None)


def read_generation(request: InferRequest) -> GenerationRequest:
    """Return ``request`` as a request for text.

    Raises `InvalidArgument` with the name of the input, its value and the rule. Any thread.
    """
    sampling = _sampling(request)
    text, ids, messages = _text(request, "text_input"), _input_ids(request), _json(request, "messages", list)
    given = [name for name, value in (("text_input", text), ("input_ids", ids), ("messages", messages)) if value]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise InvalidArgument(f"a prompt is one of text_input, input_ids and messages, and not empty; got {got}")
    tools = _json(request, "tools", list) or []
    for name, members, most in (("messages", messages or [], MAX_MESSAGES), ("tools", tools, MAX_TOOLS)):
        if len(members) > most:
            raise InvalidArgument(f"{name} has {len(members)} members, the limit is {most}")
        for each in members:
            if type(each) is not dict:
                raise InvalidArgument(f"a member of {name} must be a JSON object, got {shown(each)}")
    images = _images(request)
    if images and not text:
        raise InvalidArgument("the input image goes with text_input; in messages, an image is a part of a message")
    flag = _flags(request)
    stream = flag("stream", False)
    echoes = not flag("exclude_input_in_output", stream)
    if echoes and stream:  # Triton's text
        raise InvalidArgument("When streaming, `exclude_input_in_output` = False is not allowed.")
    return GenerationRequest(
        id=request.id,
        text=text or None,
        input_ids=ids or None,
        messages=messages or None,
        tools=tools,
        tool_choice=_tool_choice(request, tools),
        images=images,
        sampling=sampling,
        stream=stream,
        echoes_prompt=bool(text) and echoes,
        wants_finish_reason=flag("return_finish_reason", False),
        wants_cumulative_logprob=flag("return_cumulative_logprob", False),
        wants_logprobs=flag("return_logprobs", False),
        wants_num_input_tokens=flag("return_num_input_tokens", False),
        wants_num_output_tokens=flag("return_num_output_tokens", False),
        wants_output_ids=flag("return_output_ids", False),
        priority=request.priority or _parameter(request, "priority", 2**64 - 1),
        deadline_ns=_deadline_ns(request),
    )


def _tool_choice(request: InferRequest, tools: Sequence[Mapping[str, Any]]) -> Any:
    choice = _json(request, "tool_choice", object)
    if choice is None or (type(choice) is str and choice in _CHOICES):
        if choice == "required" and not tools:
            raise InvalidArgument("tool_choice is 'required', and there are no tools")
        return choice
    function = choice.get("function") if type(choice) is dict else None
    name = function.get("name") if type(function) is dict else None
    if type(name) is not str:
        raise InvalidArgument(f"tool_choice must be one of {', '.join(_CHOICES)}, or a function, got {shown(choice)}")
    functions = [each.get("function") for each in tools]
    if name not in [each.get("name") for each in functions if type(each) is dict]:
        raise InvalidArgument(f"tool_choice names the tool {shown(name)}, which is none of tools")
    return choice


def _deadline_ns(request: InferRequest) -> int:
    """Return the earlier of the deadline of the call and the end of the request's timeout, from now on; 0 for never."""
    timeout_us = request.timeout_us or _parameter(request, "timeout", 2**63 - 1)
    return min(filter(None, (request.deadline_ns, timeout_us and monotonic_ns() + 1000 * timeout_us)), default=0)


def _parameter(request: InferRequest, name: str, most: int) -> int:
    """Return a parameter that ``generate``, as in Triton, has not read as a member of the request; 0 without it."""
    value = request.parameters.get(name, 0)
    return whole_number(name, value, 0, most)


def _sampling(request: InferRequest) -> Sampling:
    """Return the sampling parameters: of the input, or else of the request's parameters, as Triton does."""
    text = _bytes(request, "sampling_parameters")
    if text is not None:
        return read_sampling(text)
    # Others are not about sampling, such as headers that are forwarded.
    return sampling_of({name: value for name, value in request.parameters.items() if name in SAMPLING_MEMBERS})


def _flags(request: InferRequest) -> Any:
    def flag(name: str, default: bool) -> bool:
        value = request.inputs.get(name)
        if value is None:
            return default
        if not isinstance(value, np.ndarray) or value.size != 1:
            raise InvalidArgument(f"input '{name}' must be one boolean")
        return bool(value.ravel()[0])

    return flag


def _bytes(request: InferRequest, name: str) -> bytes | None:
    """Return the one string of the input ``name``; None if it is missing."""
    items = _items(request, name)
    if items is None:
        return None
    if len(items) != 1:
        raise InvalidArgument(f"input '{name}' must be one string, got {len(items)}")
    return items[0]


def _items(request: InferRequest, name: str) -> Sequence[bytes] | None:
    value = request.inputs.get(name)
    if value is None:
        return None
    if not isinstance(value, BytesTensor):
        raise InvalidArgument(f"input '{name}' must be of type BYTES")
    return value.items()


def _text(request: InferRequest, name: str) -> str | None:
    text = _bytes(request, name)
    try:
        return None if text is None else text.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input '{name}' is not UTF-8: byte {error.start} is {text[error.start]:#04x}") from None  # type: ignore[index]


def _json(request: InferRequest, name: str, kind: type) -> Any:
    """Return the JSON value in the input ``name``; None if it is missing or empty."""
    text = _bytes(request, name)
    if not text:
        return None
    if len(text) > MAX_JSON_VALUES and (count := sum(map(text.count, (b",", b"[", b"{")))) > MAX_JSON_VALUES:
        raise InvalidArgument(f"input '{name}' has {count} commas and brackets, the limit is {MAX_JSON_VALUES}")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"input '{name}' is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise InvalidArgument(f"input '{name}' must be a JSON array, got {shown(value)}")
    if (depth := depth_of(value)) > MAX_CONSTRAINT_DEPTH:
        raise InvalidArgument(f"input '{name}' is nested {depth} levels deep, the limit is {MAX_CONSTRAINT_DEPTH}")
    return value


def _input_ids(request: InferRequest) -> Sequence[int] | None:
    value = request.inputs.get("input_ids")
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        raise InvalidArgument("input 'input_ids' must be whole numbers")
    if value.size > MAX_INPUT_IDS:
        raise InvalidArgument(f"input 'input_ids' has {value.size} tokens, the limit is {MAX_INPUT_IDS}")
    ids: list[int] = value.ravel().tolist()
    if ids and min(ids) < 0:
        raise InvalidArgument(f"input 'input_ids' has the token {min(ids)}: a token is not negative")
    return ids


def _images(request: InferRequest) -> Sequence[bytes]:
    images = _items(request, "image") or []
    if len(images) > MAX_IMAGES:
        raise InvalidArgument(f"input 'image' has {len(images)} images, the limit is {MAX_IMAGES}")
    return images
