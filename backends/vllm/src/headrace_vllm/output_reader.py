"""From vLLM's outputs to the contract's parts of an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from headrace import BackendError, Cancelled
from headrace_llm import Delta, TokenLogprob, piece_text

#: vLLM's reasons to finish, as the contract has them.
_REASONS: Final = {None: "", "stop": "stop", "length": "length", "repetition": "stop"}


class DeltaReader:
    """Reads the outputs of one request, which have only what is new. ``parser`` of vLLM finds tool calls and reasoning
    in the text; None leaves all in the text."""

    def __init__(
        self,
        alternatives: int | None,
        partial_text: Callable[[int], str],
        parser: Any = None,
        chat_request: Any = None,
    ) -> None:
        """``alternatives`` is how many there are for each token; None: no log probabilities. ``partial_text`` is
        `partial_text` with the tokenizer of the model."""
        self._partial_text = partial_text
        self._alternatives, self._parser, self._chat_request = alternatives, parser, chat_request
        self._sum = 0.0
        self._has_called = False

    def read(self, output: Any) -> Delta:
        """Return the part in ``output``, a ``RequestOutput`` with one completion.

        Raises `HeadraceError` if ``output`` reports that the request has failed.
        """
        new = output.outputs[0]
        reason = _REASONS.get(new.finish_reason)
        if reason is None:
            raise _failed(new.finish_reason)
        ids = list(new.token_ids)
        delta = Delta(
            text=new.text,
            num_tokens=len(ids),
            ids=ids,
            num_input_tokens=len(output.prompt_token_ids or ()),
            finish_reason=reason,
        )
        if self._alternatives is not None and new.logprobs:
            delta.logprobs = [
                self._logprob(token, found, self._alternatives) for token, found in zip(ids, new.logprobs, strict=True)
            ]
            delta.cumulative_logprob = new.cumulative_logprob - self._sum
            self._sum = new.cumulative_logprob
        if self._parser is not None:
            self._parse(delta, output.prompt_token_ids)
        return delta

    def _logprob(self, token: int, found: Any, alternatives: int) -> TokenLogprob:
        """Return ``token`` as the contract has it. ``found`` maps it, and the most likely tokens, to ``Logprob``."""
        chosen = found[token]
        ranked = sorted((each.rank, other, each) for other, each in found.items())[:alternatives]
        top = [(other, self._text(other, each), each.logprob) for _, other, each in ranked]
        return TokenLogprob(token, self._text(token, chosen), chosen.logprob, top, chosen.rank or 0)

    def _text(self, token: int, found: Any) -> str:
        """Return the text of ``token`` with all of its bytes. vLLM has those of a part of a character in the token
        that completes it."""
        return self._partial_text(token) or found.decoded_token or ""

    def _parse(self, delta: Delta, prompt_ids: list[int] | None) -> None:
        """Divide the text of ``delta`` into text, reasoning and tool calls."""
        found = self._parser.parse_delta(
            delta_text=delta.text,
            delta_token_ids=delta.ids,
            request=self._chat_request,
            prompt_token_ids=prompt_ids,
            finished=bool(delta.finish_reason),
        )
        delta.text = ""
        if found is not None:
            delta.text, delta.reasoning = found.content or "", found.reasoning or ""
            delta.tool_calls = [each.model_dump(exclude_none=True) for each in found.tool_calls or ()]
            self._has_called = self._has_called or bool(delta.tool_calls)
        if self._has_called and delta.finish_reason == "stop":
            delta.finish_reason = "tool_calls"


def _failed(reason: Any) -> BackendError | Cancelled:
    if reason == "abort":
        return Cancelled("vLLM has aborted the request")
    return BackendError(f"vLLM has ended the request with '{reason}'")


def start_ns(output: Any) -> int:
    """Return when the engine has begun to work on the request of ``output``, on the monotonic clock; 0 if vLLM takes no
    times. Its engine is another process of this machine, with the same clock."""
    return int(1e9 * output.metrics.scheduled_ts) if output.metrics is not None else 0


def partial_text(tokenizer: Any, token: int) -> str:
    """Return the text of ``token``, as `TokenLogprob` has it, if it is no whole characters; else an empty string."""
    decoded: str = tokenizer.decode([token])
    if "\ufffd" not in decoded:
        return ""
    [piece] = tokenizer.convert_ids_to_tokens([token])
    text = piece_text(piece, decoded) if isinstance(piece, str) else decoded
    return "" if text == decoded else text
