"""From the contract's sampling parameters to vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from headrace import InvalidArgument, one_line
from headrace_llm import GenerationRequest, shown

_DEFAULTED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
#: The most members of a list of tokens or words.
MAX_ITEMS: Final = 1024
#: A member that is not for the sampler: arguments of the chat template.
TEMPLATE_ARGUMENTS: Final = "chat_template_kwargs"


def sampling_arguments(request: GenerationRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's ``SamplingParams`` for ``request``, without ``structured_outputs``.

    ``defaults`` are those of the model's ``generation_config.json``. Raises `InvalidArgument` for a member that vLLM
    does not have, with its value and the rule for one that it has.
    """
    sampling = request.sampling
    found: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "min_tokens": sampling.min_tokens,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": sampling.logprobs,
        "logit_bias": dict(sampling.logit_bias) or None,
    }
    if sampling.logprobs is None and (request.wants_logprobs or request.wants_cumulative_logprob):
        found["logprobs"] = 0  # of the chosen token only
    for name in _DEFAULTED:
        value = getattr(sampling, name)
        value = defaults.get(name) if value is None else value
        if value is not None:
            found[name] = value
    if found.get("top_p") == 0:  # vLLM has no 0; the smallest set is the most likely token
        del found["top_p"]
        found["top_k"] = 1
    for name, value in sampling.more.items():
        if name == TEMPLATE_ARGUMENTS:
            continue
        if name not in _MORE:
            known = ", ".join(sorted(_MORE))
            raise InvalidArgument(
                f"sampling_parameters has the member '{one_line(name)}', which vLLM does not have. Beside the common "
                f"ones it has {known}, {TEMPLATE_ARGUMENTS}"
            )
        found[name] = _MORE[name](name, value)
    stop_ids = [*(found.get("stop_token_ids") or ()), *(defaults.get("stop_token_ids") or ())]
    if stop_ids:
        found["stop_token_ids"] = list(dict.fromkeys(stop_ids))
    return found


def template_arguments(request: GenerationRequest) -> Mapping[str, Any] | None:
    """Return the arguments for the chat template, such as ``enable_thinking``. Raises `InvalidArgument`."""
    value = request.sampling.more.get(TEMPLATE_ARGUMENTS)
    if value is None:
        return None
    if type(value) is not dict:
        raise InvalidArgument(f"{TEMPLATE_ARGUMENTS} must be a JSON object, got {shown(value)}")
    if "chat_template" in value:
        raise InvalidArgument(f"{TEMPLATE_ARGUMENTS} has the member 'chat_template': the template is the model's own")
    if request.messages is None:
        raise InvalidArgument(f"{TEMPLATE_ARGUMENTS} goes with messages: a prompt has no template")
    return value


def _boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise InvalidArgument(f"{name} must be true or false, got {shown(value)}")
    return value


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not -1 <= value < 2**31:
        raise InvalidArgument(f"{name} must be a whole number from -1 to {2**31 - 1}, got {shown(value)}")
    return value


def _tokens(name: str, value: Any) -> list[int]:
    return _items(name, value, "tokens", lambda each: type(each) is int and 0 <= each < 2**31)


def _words(name: str, value: Any) -> list[str]:
    return _items(name, value, "strings, none empty", lambda each: type(each) is str and bool(each))


def _items(name: str, value: Any, what: str, is_right: Callable[[Any], bool]) -> list[Any]:
    if type(value) is not list or not all(map(is_right, value)):
        raise InvalidArgument(f"{name} must be an array of {what}, got {shown(value)}")
    if len(value) > MAX_ITEMS:
        raise InvalidArgument(f"{name} has {len(value)} members, the limit is {MAX_ITEMS}")
    return value


_MORE: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "allowed_token_ids": _tokens,
    "bad_words": _words,
    "include_stop_str_in_output": _boolean,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "stop_token_ids": _tokens,
    "thinking_token_budget": _count,
}
