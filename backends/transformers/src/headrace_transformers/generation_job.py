"""One request in an engine: from its tokens to the text for its caller."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace import HeadraceError
from headrace_llm import Delta, TokenStream, ToolCallParser
from headrace_transformers.text_stream import TextStream
from headrace_transformers.token_choice import TokenChooser


class GenerationJob:
    """A request with its prompt as tokens. `take` is called by the engine, one call at a time.

    ``eos`` are the tokens that end the text; empty to ignore them. ``chooser`` is None if the highest score is taken.
    ``config``, ``model`` and ``tensors``, which the model gets beside the prompt, are for `OneByOneEngine`.
    """

    def __init__(
        self,
        stream: TokenStream,
        prompt: Sequence[int],
        max_tokens: int,
        eos: Collection[int],
        chooser: TokenChooser | None,
        text: TextStream,
        tools: ToolCallParser | None = None,
        config: Any = None,
        model: Any = None,
        tensors: Mapping[str, Any] | None = None,
    ) -> None:
        self.stream, self.prompt, self.max_tokens, self.eos, self.chooser = stream, prompt, max_tokens, eos, chooser
        self._text, self._tools, self.config, self.model = text, tools, config, model
        self._tensors = tensors or {}
        self._count = 0
        self.has_started = self.is_retried = False
        #: The generation loop that has the job.
        self.loop: Any = None

    def tensors_for(self, model: Any) -> dict[str, Any]:
        """Return the tensors beside the prompt, on the device and in the type of ``model``."""
        made = {}
        for name, value in self._tensors.items():
            if hasattr(value, "is_floating_point"):
                value = value.to(model.device, model.dtype if value.is_floating_point() else None)
            made[name] = value
        return made

    def note_prompt(self) -> None:
        """Note that the engine has the prompt."""
        self.stream.note_prompt(len(self.prompt))

    def start(self) -> None:
        """Note that the engine begins to work on the request."""
        self.has_started = True
        self.note_prompt()
        self.stream.note_start()

    def take(self, token: int) -> bool:
        """Send ``token``. Return False if it is the last one, or the caller has disconnected."""
        self._count += 1
        is_end = token in self.eos
        text = "" if is_end else self._text.add(token)
        reason = ""
        if is_end or self._text.has_stopped or (self.chooser is not None and self.chooser.is_complete):
            reason = "stop"
        elif self._count >= self.max_tokens:
            reason = "length"
        if reason:
            text += self._text.rest()
        delta = Delta(text, 1, [token], num_input_tokens=len(self.prompt), finish_reason=reason)
        if self._tools is not None:
            self._tools.take(delta)
        if self.chooser is not None and self.chooser.logprob is not None:
            delta.logprobs = [] if is_end else [self.chooser.logprob]  # those of the text
            delta.cumulative_logprob = self.chooser.logprob.logprob
        return self.stream.write(delta) and not reason

    def fail(self, error: HeadraceError) -> None:
        self.stream.fail(error)
