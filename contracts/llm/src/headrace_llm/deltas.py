"""From what an engine generates to responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from headrace import BytesTensor, InferResponse, Tensor
from headrace_llm.generation_request import GenerationRequest


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its text, the logarithm of its probability, and the most likely tokens at its place, likeliest first.

    Bytes of a text that are no whole characters are surrogates, as in `os.fsdecode`: `token_text`, `token_bytes`.
    ``rank`` is 1 for the likeliest token. If it is 0, the rank is the token's place in ``top``, or the next place.
    """

    id: int
    text: str
    logprob: float
    top: Sequence[tuple[int, str, float]] = ()
    rank: int = 0


@dataclass(slots=True)
class Delta:
    """A part of an answer: what is new since the last one.

    ``text`` may be empty while a character or a stop string is incomplete. ``num_tokens`` counts the new tokens, also
    if ``ids`` lacks them. ``finish_reason`` is set in the last one only: ``stop``, ``length`` or ``tool_calls``.
    ``num_input_tokens`` is of the prompt; 0 if it is not known yet. ``cumulative_logprob`` is the sum
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


def joined(deltas: Sequence[Delta]) -> Delta:
    """Return ``deltas``, at least one, as one part. The first may be changed."""
    first, *later = deltas
    if later:
        text, reasoning = "".join([each.text for each in deltas]), "".join([each.reasoning for each in deltas])
        for each in later:
            each.text = each.reasoning = ""
            first.add(each)
        first.text, first.reasoning = text, reasoning
    return first


@dataclass(slots=True)
class UsedTokens:
    """The tokens of a request: of its prompt once the engine has accepted it, and those written and sent so far."""

    declares_input: bool
    input: int = 0
    written: int = 0
    sent: int = 0

    def response(self) -> InferResponse | None:
        """Return what was used and not sent, without text, for a request that fails. None if nothing was used."""
        if not self.input and self.written <= self.sent:
            return None
        given: dict[str, Tensor] = {"text_output": _string(""), "num_output_tokens": _count(self.written - self.sent)}
        if self.declares_input:
            given["num_input_tokens"] = _count(self.input)
        return InferResponse(given)


def response_of(request: GenerationRequest, delta: Delta, outputs: Sequence[str] = ()) -> InferResponse:
    """Return ``delta`` as the response to ``request``. ``outputs`` are those that the caller names; empty for all."""
    given: dict[str, Tensor] = {"text_output": _string(delta.text)}
    if request.wants_finish_reason:
        given["finish_reason"] = _usual_string(delta.finish_reason or "None")  # as in Triton's backend
    if request.wants_cumulative_logprob:
        given["cumulative_logprob"] = np.array([delta.cumulative_logprob], np.float32)
    if request.wants_logprobs:
        given["logprobs"] = _string(print_logprobs(delta.logprobs))
    if request.wants_num_input_tokens:
        given["num_input_tokens"] = _count(delta.num_input_tokens)
    if request.wants_num_output_tokens:
        given["num_output_tokens"] = _count(delta.num_tokens)
    if request.wants_output_ids:
        given["output_ids"] = np.array(delta.ids, np.int32)
    if delta.tool_calls:
        given["tool_calls"] = _string(orjson.dumps(delta.tool_calls).decode())
    if delta.reasoning:
        given["reasoning"] = _string(delta.reasoning)
    if outputs:
        given = {name: tensor for name, tensor in given.items() if name in outputs}
    return InferResponse(given)


@lru_cache(4096)
def _count(number: int) -> Tensor:
    """Return u32[1], shared by responses: it is the same for nearly all tokens."""
    array = np.array([number], np.uint32)
    array.flags.writeable = False
    return array


def _string(text: str) -> BytesTensor:
    encoded = text.encode(errors="replace")  # an engine may write half of a surrogate pair
    buffer = len(encoded).to_bytes(4, "little") + encoded
    return BytesTensor(buffer, (1,), np.array((0, len(buffer)), np.int64))


_usual_string = lru_cache(64)(_string)


def print_logprobs(logprobs: Sequence[TokenLogprob]) -> str:
    """Return ``logprobs`` as Triton's vLLM backend prints them, each token's own first::

    [{"42": {"logprob": -0.1, "rank": 1, "decoded_token": " the"}, ...}, ...]

    A token that is no whole characters has its ``bytes``, too, as numbers.
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
    rank = token.rank or ranks.get(token.id, len(ranks) + 1)
    found = {str(token.id): _entry(token.logprob, rank, token.text)}
    for rank, (other, text, logprob) in enumerate(token.top, 1):
        found.setdefault(str(other), _entry(logprob, rank, text))
    return found


def _entry(logprob: float, rank: int, text: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"logprob": logprob, "rank": rank, "decoded_token": text}
    try:
        text.encode()
    except UnicodeEncodeError:
        data = token_bytes(text)
        entry |= {"decoded_token": data.decode(errors="replace"), "bytes": list(data)}
    return entry


def token_text(data: bytes) -> str:
    """Return ``data`` as the text of a `TokenLogprob`."""
    return data.decode(errors="surrogateescape")


def token_bytes(text: str) -> bytes:
    """Return the reverse of `token_text`."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair
        return text.encode(errors="replace")


def _token(alternatives: dict[str, dict[str, Any]]) -> TokenLogprob:
    entries = [(int(token), _text(each), float(each["logprob"])) for token, each in alternatives.items()]
    return TokenLogprob(*next(iter(entries)), sorted(entries, key=lambda entry: -entry[2]))


def _text(entry: dict[str, Any]) -> str:
    data = entry.get("bytes")
    return token_text(bytes(data)) if type(data) is list and data else entry["decoded_token"] or ""
