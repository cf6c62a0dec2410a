"""From the chunks that llama.cpp writes to parts of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace import BackendError, HeadraceError, InvalidArgument, Unavailable, Unsupported
from headrace_llm import Delta, TokenLogprob, token_text


class ChunkReader:
    """Reads the chunks of one answer. One thread. ``alternatives`` is how many are reported for each token."""

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives
        #: Tokens of the prompt and of the answer so far.
        self.num_input_tokens = self.num_output_tokens = 0

    def read(self, chunk: Mapping[str, Any]) -> Delta:
        """Return what is new in ``chunk``. Raises `HeadraceError` if it is an error."""
        if "error" in chunk:
            raise error_of(chunk["error"])
        delta = Delta()
        progress, timings = chunk.get("prompt_progress"), chunk.get("timings")
        if progress is not None and not self.num_input_tokens:
            delta.num_input_tokens = self.num_input_tokens = progress["total"]
        if timings is not None and timings["predicted_n"] > self.num_output_tokens:
            delta.num_tokens = timings["predicted_n"] - self.num_output_tokens
            self.num_output_tokens = timings["predicted_n"]
        for choice in chunk["choices"]:
            self._read_choice(choice, delta)
        return delta

    def _read_choice(self, choice: Mapping[str, Any], delta: Delta) -> None:
        if message := choice.get("delta"):
            delta.text += message.get("content") or ""
            delta.reasoning += message.get("reasoning_content") or ""
            delta.tool_calls += message.get("tool_calls") or ()
        else:
            delta.text += choice.get("text") or ""
        if logprobs := choice.get("logprobs"):
            for token in logprobs["content"]:
                self._read_token(token, delta)
        if reason := choice.get("finish_reason"):
            delta.finish_reason = reason if reason in ("length", "tool_calls") else "stop"

    def _read_token(self, token: Mapping[str, Any], delta: Delta) -> None:
        delta.ids.append(token["id"])
        if "logprob" not in token:
            return
        most = token["top_logprobs"][: self._alternatives]
        top = [(each["id"], token_text(bytes(each["bytes"])), each["logprob"]) for each in most]
        delta.logprobs.append(TokenLogprob(token["id"], token["token"], token["logprob"], top))
        delta.cumulative_logprob += token["logprob"]


def error_of(error: Mapping[str, Any]) -> HeadraceError:
    """Return llama.cpp's ``error`` as one of Headrace."""
    message, code = f"llama.cpp: {error.get('message')}", error.get("code")
    if error.get("type") == "exceed_context_size_error":
        return InvalidArgument(
            f"the prompt has {error.get('n_prompt_tokens')} tokens and the context is {error.get('n_ctx')} tokens"
        )
    if code == 400 or "too large to process" in message:  # of a text whose tokens do not fit
        return InvalidArgument(message)
    if code == 503:
        return Unavailable(message)
    return Unsupported(message) if code == 501 else BackendError(message)
