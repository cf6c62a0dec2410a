"""From what an engine generates to responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from headrace import BytesTensor, InferResponse, Tensor
from headrace_llm.generation_request import GenerationRequest


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its text, the logarithm of its probability, and the most likely tokens at its place, likeliest first."""

    id: int
    text: str
    logprob: float
    top: Sequence[tuple[int, str, float]] = ()


@dataclass(slots=True)
class Delta:
    """A part of an answer: what is new since the last one.

    ``text`` may be empty while a character or a stop string is incomplete. ``num_tokens`` are the new tokens, also if
    the engine does not say which (``ids``). ``finish_reason`` is set in the last one only: ``stop``, ``length`` or
    ``tool_calls``. ``num_input_tokens`` is of the prompt; 0 if it is not known yet. ``cumulative_logprob`` is the sum
    over the new tokens. ``tool_calls`` are deltas as in OpenAI's chat completion chunks.
    """

    text: str = ""
    num_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_input_tokens: int = 0
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    finish_reason: str = ""

    def add(self, later: Delta) -> None:
        """Append ``later`` to this part."""
        self.text += later.text
        self.num_tokens += later.num_tokens
        self.ids += later.ids
        self.logprobs += later.logprobs
        self.cumulative_logprob += later.cumulative_logprob
        self.num_input_tokens = later.num_input_tokens or self.num_input_tokens
        self.tool_calls += later.tool_calls
        self.reasoning += later.reasoning
        self.finish_reason = later.finish_reason


def response_of(request: GenerationRequest, delta: Delta, outputs: Sequence[str] = ()) -> InferResponse:
    """Return ``delta`` as the response to ``request``. ``outputs`` are those that the caller names; empty for all."""
    given: dict[str, Tensor] = {"text_output": _strings(delta.text)}
    if request.wants_finish_reason:
        given["finish_reason"] = _strings(delta.finish_reason or "None")  # as Triton's backend says it
    if request.wants_cumulative_logprob:
        given["cumulative_logprob"] = np.array([delta.cumulative_logprob], np.float32)
    if request.wants_logprobs:
        given["logprobs"] = _strings(print_logprobs(delta.logprobs))
    if request.wants_num_input_tokens:
        given["num_input_tokens"] = np.array([delta.num_input_tokens], np.uint32)
    if request.wants_num_output_tokens:
        given["num_output_tokens"] = np.array([delta.num_tokens], np.uint32)
    if request.wants_output_ids:
        given["output_ids"] = np.array(delta.ids, np.int32)
    if delta.tool_calls:
        given["tool_calls"] = _strings(orjson.dumps(delta.tool_calls).decode())
    if delta.reasoning:
        given["reasoning"] = _strings(delta.reasoning)
    if outputs:
        given = {name: tensor for name, tensor in given.items() if name in outputs}
    return InferResponse(given)


def print_logprobs(logprobs: Sequence[TokenLogprob]) -> str:
    """Return ``logprobs`` as Triton's vLLM backend prints them, each token's own first::

    [{"42": {"logprob": -0.1, "rank": 1, "decoded_token": " the"}, ...}, ...]
    """
    return orjson.dumps([_alternatives(each) for each in logprobs]).decode()


def read_logprobs(text: str | bytes) -> list[TokenLogprob]:
    """Return the reverse of `print_logprobs`. Raises `ValueError` for another form."""
    try:
        return [_token(each) for each in orjson.loads(text)]
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"not the log probabilities of tokens: {error!r}") from None


def _alternatives(token: TokenLogprob) -> dict[str, dict[str, Any]]:
    ranks = {each: rank for rank, (each, _, _) in enumerate(token.top, 1)}
    found = {str(token.id): _entry(token.logprob, ranks.get(token.id, len(ranks) + 1), token.text)}
    for rank, (other, text, logprob) in enumerate(token.top, 1):
        found.setdefault(str(other), _entry(logprob, rank, text))
    return found


def _entry(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


def _token(alternatives: dict[str, dict[str, Any]]) -> TokenLogprob:
    entries = [
        (int(token), each["decoded_token"] or "", float(each["logprob"])) for token, each in alternatives.items()
    ]
    return TokenLogprob(*next(iter(entries)), sorted(entries, key=lambda entry: -entry[2]))


def _strings(text: str) -> BytesTensor:
    return BytesTensor.from_items([text.encode("utf-8", "replace")], (1,))
