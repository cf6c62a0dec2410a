"""Tool calls in the text of a model: found while the text arrives.

A model declares how it writes them by the parameter ``tool_call_parser``:

- ``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` within the text
- ``llama3_json``: the whole text is ``{"name": ..., "parameters": {...}}``; several are separated by ``;``
- ``mistral``: ``[TOOL_CALLS]`` and an array, or ``[TOOL_CALLS]name[ARGS]{...}``

What is not such a call, or longer than `ToolCallParser.most_characters`, is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import orjson

from headrace_llm import HermesParser, ToolCallParser, read_calls

_Found: TypeAlias = tuple[str, Sequence[dict[str, Any]]]
_NOTHING: Final[_Found] = ("", ())


class _WholeTextParser(ToolCallParser):
    """For calls that are the whole text: it is held if it begins like one."""

    _beginnings: tuple[str, ...]

    def __init__(self) -> None:
        super().__init__()
        self._held: list[str] = []
        #: ``_start`` is what is held without the blanks before it, until the beginning of a call is complete.
        self._held_characters, self._start = 0, ""
        self._has_begun = self._is_text = False

    def feed(self, text: str) -> _Found:
        if self._is_text:
            return text, ()
        self._held.append(text)
        self._held_characters += len(text)
        if self._held_characters <= self.most_characters and self._may_be_a_call(text):
            return _NOTHING
        self._is_text = True
        held, self._held = "".join(self._held), []
        return held, ()

    def _may_be_a_call(self, text: str) -> bool:
        """True if what is held, of which ``text`` is the end, begins like a call."""
        if self._has_begun:
            return True
        self._start = (self._start + text).lstrip()
        self._has_begun = self._start.startswith(self._beginnings)
        return self._has_begun or any(each.startswith(self._start) for each in self._beginnings)

    def end(self) -> _Found:
        held, self._held = "".join(self._held), []
        found = self._read(held.strip())
        return ("", self.parts(found)) if found else (held, ())

    def _read(self, text: str) -> list[tuple[str, str]]:
        raise NotImplementedError


class Llama3Parser(_WholeTextParser):
    _beginnings = ("{", "<|python_tag|>")

    def _read(self, text: str) -> list[tuple[str, str]]:
        return read_calls(text.removeprefix("<|python_tag|>"), ";")


class MistralParser(_WholeTextParser):
    _beginnings = ("[TOOL_CALLS]",)

    def _read(self, text: str) -> list[tuple[str, str]]:
        if not text.startswith("[TOOL_CALLS]"):
            return []
        if "[ARGS]" not in text:
            return read_calls(text.removeprefix("[TOOL_CALLS]"))
        found = []
        for each in text.split("[TOOL_CALLS]")[1:]:
            name, _, arguments = each.partition("[ARGS]")
            if not name.strip() or not _is_object(arguments):
                return []
            found.append((name.strip(), arguments.strip()))
        return found


class AnyToolParser(_WholeTextParser):
    """For a text that the engine forces to be one call: ``{"name": ..., "arguments": {...}}``."""

    _beginnings = ("{",)

    def _read(self, text: str) -> list[tuple[str, str]]:
        return read_calls(text)


class NamedToolParser(ToolCallParser):
    """For a text that the engine forces to be the arguments of the tool ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._has_begun = name, False

    def feed(self, text: str) -> _Found:
        if not text:
            return _NOTHING
        if not self._has_begun:
            self._has_begun = True
            return "", self.parts([(self._name, text)])
        return "", [{"index": 0, "function": {"arguments": text}}]

    def end(self) -> _Found:
        return _NOTHING


#: The parsers by the value of the model parameter.
PARSERS: Final[dict[str, type[ToolCallParser]]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}


def _is_object(text: str) -> bool:
    try:
        return type(orjson.loads(text)) is dict
    except orjson.JSONDecodeError:
        return False
