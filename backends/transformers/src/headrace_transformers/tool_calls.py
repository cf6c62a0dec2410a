"""Tool calls in the text of a model, in the form that most models of Hugging Face are trained on (Hermes)::

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

from headrace_llm import Delta

BEGIN, END = "<tool_call>", "</tool_call>"


class ToolCallReader:
    """Takes the tool calls out of the text of one answer."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = 0
        self._skips_space = False  # between calls

    def read(self, delta: Delta) -> None:
        """Move complete calls from the text of ``delta`` to its ``tool_calls``. What may be part of one waits.

        If the answer ends within a call, its text is passed on as it is.
        """
        self._held += delta.text
        delta.text = ""
        while True:
            if self._skips_space:
                self._held = self._held.lstrip()
                self._skips_space = not self._held
            before, begin, rest = self._held.partition(BEGIN)
            if not begin:
                break
            inside, end, after = rest.partition(END)
            if not end:
                delta.text += before
                self._held = begin + rest
                break
            delta.text += before
            self._held = after
            if call := self._call(inside):
                delta.tool_calls.append(call)
                self._skips_space = True
            else:
                delta.text += begin + inside + end
        if not self._held.startswith(BEGIN):
            keep = next((n for n in range(len(BEGIN) - 1, 0, -1) if self._held.endswith(BEGIN[:n])), 0)
            delta.text += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
        if delta.finish_reason:
            delta.text, self._held = delta.text + self._held, ""
            if self._calls and delta.finish_reason == "stop":
                delta.finish_reason = "tool_calls"

    def _call(self, text: str) -> dict[str, Any] | None:
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if type(name) is not str:
            return None
        function = {"name": name, "arguments": arguments if type(arguments) is str else json.dumps(arguments)}
        self._calls += 1
        return {"index": self._calls - 1, "id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
