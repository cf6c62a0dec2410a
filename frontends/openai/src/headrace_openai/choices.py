"""Several answers to one request, at once, and their usage together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from headrace_llm import StopStrings
from headrace_openai.text_responses import TextPart

#: The most answers to one request.
MAX_CHOICES = 128


class Usage:
    """The tokens of all choices: 0 if the model does not report them, because clients expect numbers."""

    __slots__ = ("_input", "output_tokens", "reasoning_tokens")

    def __init__(self) -> None:
        self._input: dict[int, int] = {}
        #: All tokens of the answers, and those of parts that have only reasoning.
        self.output_tokens = self.reasoning_tokens = 0

    @property
    def input_tokens(self) -> int:
        return sum(self._input.values())

    def add(self, prompt: int, part: TextPart) -> None:
        """Count ``part`` of an answer to the prompt number ``prompt``."""
        if part.num_input_tokens:
            self._input[prompt] = part.num_input_tokens
        if part.num_output_tokens:
            self.output_tokens += part.num_output_tokens
            if part.reasoning and not (part.text or part.tool_calls):
                self.reasoning_tokens += part.num_output_tokens

    def document(self) -> dict[str, Any]:
        """Return the member ``usage``."""
        prompt, completion = self.input_tokens, self.output_tokens
        found = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        if self.reasoning_tokens:
            return {**found, "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}
        return found


async def stopping(parts: AsyncIterator[TextPart], stop: Sequence[str]) -> AsyncIterator[TextPart]:
    """Yield ``parts``, whose text ends before the first of ``stop``: a model may not know them.

    The rest is cancelled.
    """
    strings = StopStrings(stop)
    async with aclosing(parts):  # type: ignore[type-var]
        async for part in parts:
            part.text = strings.feed(part.text)
            if strings.has_stopped:
                part.finish_reason = "stop"
                yield part
                return
            if part.finish_reason:
                part.text += strings.rest()
            yield part


async def numbered(choices: Sequence[AsyncIterator[TextPart]]) -> AsyncIterator[tuple[int, TextPart]]:
    """Yield the parts of all ``choices``, each with the number of its choice, in the order of their arrival.

    An error of one ends all. Closing it closes all.
    """
    if len(choices) == 1:
        async with aclosing(choices[0]) as parts:  # type: ignore[type-var]
            async for part in parts:
                yield 0, part
        return
    arrived: asyncio.Queue[tuple[int, TextPart | BaseException | None]] = asyncio.Queue(len(choices))

    async def pump(number: int, parts: AsyncIterator[TextPart]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(parts):  # type: ignore[type-var]
                async for part in parts:
                    await arrived.put((number, part))
        except Exception as error:
            end = error
        await arrived.put((number, end))

    tasks = [asyncio.ensure_future(pump(number, parts)) for number, parts in enumerate(choices)]
    try:
        left = len(tasks)
        while left:
            number, arriving = await arrived.get()
            if isinstance(arriving, TextPart):
                yield number, arriving
            elif arriving is None:
                left -= 1
            else:
                raise arriving
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
