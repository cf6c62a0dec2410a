"""From members of the body to the input ``sampling_parameters``, whose names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace import InvalidArgument
from headrace_llm import sampling_of
from headrace_openai.body_members import flag, members, named, one_of, shown, whole
from headrace_openai.openai_errors import BadMember

#: Members that are sampling parameters, by the same names.
_SAME = (
    "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "structured_outputs",
)  # fmt: skip
#: Further members of vLLM. An engine that does not have one refuses it.
_ENGINES = (
    "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "bad_words", "allowed_token_ids",
    "length_penalty", "chat_template_kwargs",
)  # fmt: skip
_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
_MOST_LOGPROBS = 20


def read_sampling_members(document: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    """Return the sampling parameters in ``document``.

    Raises `BadMember`, with the rules of `headrace_llm.sampling_of`.
    """
    found = {name: document[name] for name in (*_SAME, *_ENGINES) if document.get(name) is not None}
    if (most := document.get("max_completion_tokens")) is not None:
        found["max_tokens"] = most
    for name, kind in _GUIDED.items():  # its older names
        if document.get(name) is not None:
            found["structured_outputs"] = {
                **members(found, "structured_outputs", "structured_outputs"),
                kind: document[name],
            }
    if (logprobs := _logprobs(document, is_chat)) is not None:
        found["logprobs"] = logprobs
    if is_chat and (constraint := _format(document)):
        if "structured_outputs" in found:
            raise BadMember("response_format", "response_format and structured_outputs are two constraints, give one")
        found["structured_outputs"] = constraint
    try:
        sampling = sampling_of(found)
    except InvalidArgument as error:
        raise named(error, (*_SAME, *_ENGINES)) from None
    if sampling.seed is not None:
        found["seed"] = sampling.seed  # it may be a text
    return found


def _logprobs(document: Mapping[str, Any], is_chat: bool) -> int | None:
    """Return the number of alternatives of each token; None for no log probabilities."""
    if not is_chat:
        count = whole(document, "logprobs", 0, _MOST_LOGPROBS, -1)
        return None if count < 0 else count
    if not flag(document, "logprobs"):
        if document.get("top_logprobs"):
            raise BadMember("top_logprobs", "top_logprobs needs logprobs to be true")
        return None
    return whole(document, "top_logprobs", 0, _MOST_LOGPROBS, 0)


def _format(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constraint that ``response_format`` is; empty for text."""
    given = members(document, "response_format", "response_format")
    if not given:
        return {}
    kind = one_of(given.get("type"), "response_format.type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    schema = members(given, "json_schema", "response_format.json_schema").get("schema")
    if type(schema) is not dict:
        where = "response_format.json_schema.schema"
        raise BadMember("response_format", f"{where} must be a JSON schema, got {shown(schema)}")
    return {"json": schema}
