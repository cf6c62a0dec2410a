"""From a request for text to the body that llama.cpp's handlers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace import InvalidArgument, one_line
from headrace_llamacpp.constraints import check_schema
from headrace_llamacpp.llama_server import ModelFiles
from headrace_llm import GenerationRequest, Sampling, shown

#: The marker of an image in a prompt.
_MEDIA: Final = "<__media__>"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of a model, for the checks of its requests."""

    name: str
    context: int
    files: ModelFiles


def body_of(request: GenerationRequest, limits: ModelLimits, grammar: str) -> dict[str, Any]:
    """Return the body for ``handle_chat_completions`` if ``request`` has messages, else for ``handle_completions``.

    Raises `InvalidArgument` with the name of the unsupported feature.
    """
    sampling = request.sampling
    if sampling.more:
        raise InvalidArgument(f"llama.cpp has no sampling parameter '{one_line(str(next(iter(sampling.more))))[:100]}'")
    if sampling.min_tokens:
        raise InvalidArgument(f"llama.cpp has no min_tokens, got {sampling.min_tokens}")
    body: dict[str, Any] = {"stream": True, "timings_per_token": True, "return_progress": True, **_sampling(sampling)}
    if request.max_tokens is not None:
        body["n_predict"] = min(request.max_tokens, limits.context)
    if request.wants_logprobs or request.wants_cumulative_logprob or request.wants_output_ids:
        body["n_probs"] = max(1, sampling.logprobs or 0)
        # Probabilities before sampling need all logits; after it, only the token that is there anyway.
        body["post_sampling_probs"] = not (request.wants_logprobs or request.wants_cumulative_logprob)
    if sampling.logit_bias:
        body["logit_bias"] = [[token, bias] for token, bias in sampling.logit_bias.items()]
        _check_tokens("logit_bias", list(sampling.logit_bias), limits)
    if sampling.lora_name or limits.files.adapters:
        body["lora"] = _adapters(sampling.lora_name, limits)
    if grammar:
        body["grammar"] = grammar
    if request.messages is not None:
        return body | _chat(request, limits)
    if request.tools:
        raise InvalidArgument("tools go with messages")
    return body | {"prompt": _prompt(request, limits)}


#: The names of sampling parameters in llama.cpp, if they have a value.
_NAMES: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    body = {theirs: value for ours, theirs in _NAMES.items() if (value := getattr(sampling, ours)) is not None}
    if sampling.top_k is not None:
        body["top_k"] = max(0, sampling.top_k)
    if sampling.seed is not None:
        body["seed"] = sampling.seed % (2**32 - 1)  # the last number means a random seed
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    return body


def _prompt(request: GenerationRequest, limits: ModelLimits) -> Any:
    if request.input_ids is not None:
        _check_size(len(request.input_ids), f"{len(request.input_ids)} tokens", limits)
        _check_tokens("input_ids", request.input_ids, limits)
        return list(request.input_ids)
    text = request.text or ""
    _check_text(len(text.encode("utf-8", "replace")), limits)
    if not request.images:
        return text
    if limits.files.projector is None:
        raise _no_images(limits)
    missing = len(request.images) - text.count(_MEDIA)
    return {
        "prompt_string": _MEDIA * max(0, missing) + text,
        "multimodal_data": [image.decode("ascii", "replace") for image in request.images],
    }


def _check_text(size: int, limits: ModelLimits) -> None:
    """Refuse a prompt that cannot fit, before llama.cpp takes seconds to make its tokens."""
    longest = limits.files.header.longest_token
    if longest:
        least = -(-size // longest)
        _check_size(least, f"{size} bytes, at least {least} tokens,", limits)


def _check_size(tokens: int, what: str, limits: ModelLimits) -> None:
    if tokens > limits.context:
        raise InvalidArgument(
            f"the prompt has {what} and the context of model '{limits.name}' is {limits.context} tokens"
        )


def _check_tokens(name: str, tokens: Sequence[int], limits: ModelLimits) -> None:
    most = limits.files.header.vocabulary
    if most and tokens and max(tokens) >= most:
        raise InvalidArgument(f"{name} has the token {max(tokens)}; model '{limits.name}' has {most} tokens")


def _adapters(name: str, limits: ModelLimits) -> list[dict[str, Any]]:
    """Return the scale of each adapter: without it, llama.cpp uses the scales of the last request."""
    names = list(limits.files.adapters)
    if name and name not in names:
        known = ", ".join(names) or "none"
        raise InvalidArgument(f"model '{limits.name}' has no adapter '{one_line(name)[:100]}'; it has {known}")
    return [{"id": number, "scale": float(each == name)} for number, each in enumerate(names)]


def _no_images(limits: ModelLimits) -> InvalidArgument:
    return InvalidArgument(f"model '{limits.name}' takes no images: its config has no parameter 'mmproj'")


def _chat(request: GenerationRequest, limits: ModelLimits) -> dict[str, Any]:
    messages = request.messages or ()
    size = 0
    for message in messages:
        size += _check_message(message, limits)
    _check_text(size, limits)
    body: dict[str, Any] = {"messages": list(messages)}
    if request.tools and request.tool_choice != "none":
        if "tools" not in limits.files.chat_template:
            raise InvalidArgument(f"model '{limits.name}' takes no tools: its chat template has none")
        for tool in request.tools:
            function = tool.get("function")
            check_schema(function.get("parameters") if type(function) is dict else None, "a tool")
        body["tools"], body["tool_choice"] = _tools(request)
        body["parallel_tool_calls"] = True
    return body


def _tools(request: GenerationRequest) -> tuple[list[Mapping[str, Any]], str]:
    """Return the tools and the choice in llama.cpp's terms: one tool that is named is the only one, and required."""
    choice = request.tool_choice
    if choice is None or choice in ("auto", "required"):
        return list(request.tools), choice or "auto"
    name = choice["function"]["name"]
    functions = ((tool, tool.get("function")) for tool in request.tools)
    return [tool for tool, each in functions if type(each) is dict and each.get("name") == name], "required"


def _check_message(message: Mapping[str, Any], limits: ModelLimits) -> int:
    """Return the size of the text of ``message``. Raises `InvalidArgument` for parts other than text and images."""
    content = message.get("content")
    if type(content) is str:
        return len(content)
    if content is not None and type(content) is not list:
        raise InvalidArgument(f"the content of a message must be a string or an array, got {shown(content)}")
    size = 0
    for part in content or ():
        kind = part.get("type") if type(part) is dict else None
        if kind == "text" and type(part.get("text")) is str:
            size += len(part["text"])
        elif kind == "image_url":
            _check_image(part, limits)
        else:
            raise InvalidArgument(f"a part of a message must be of type text or image_url, got {shown(part)}")
    return size


def _check_image(part: Mapping[str, Any], limits: ModelLimits) -> None:
    """Refuse addresses: llama.cpp would fetch them, from this machine, too."""
    if limits.files.projector is None:
        raise _no_images(limits)
    image = part.get("image_url")
    url = image.get("url") if type(image) is dict else image
    if type(url) is not str or not url.startswith("data:image/"):
        raise InvalidArgument(f"an image must be a data: URL of an image, got {shown(url)}")
