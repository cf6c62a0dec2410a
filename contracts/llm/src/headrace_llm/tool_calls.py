"""Tool calls in the text of a model: found while the text arrives.

Most models of Hugging Face are trained on the form of Hermes, which is `HermesParser`::

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Other forms are further subclasses of `ToolCallParser`. What is not such a call, or longer than
`ToolCallParser.most_characters`, is text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn
from uuid import uuid4

from headrace_llm.deltas import Delta


class ToolCallParser(ABC):
    """Finds the calls in one text. One thread at a time.

    A part of a call is a `dict` as in OpenAI's chat completion chunks: ``index``, ``id``, ``type``, ``function``.
    """

    #: The longest text in which a call is searched.
    most_characters: ClassVar[int] = 1 << 20

    def __init__(self) -> None:
        self._count = 0

    @abstractmethod
    def feed(self, text: str) -> tuple[str, Sequence[dict[str, Any]]]:
        """Take the next ``text``. Return text for the caller and parts of calls, as far as they are certain by now."""

    @abstractmethod
    def end(self) -> tuple[str, Sequence[dict[str, Any]]]:
        """Return the rest."""

    def take(self, delta: Delta) -> None:
        """Move the calls in the text of ``delta`` to its ``tool_calls``. What may be part of one is held.

        If a text with calls ends by itself, its ``finish_reason`` becomes ``tool_calls``.
        """
        delta.text, calls = self.feed(delta.text)
        delta.tool_calls += calls
        if delta.finish_reason:
            text, calls = self.end()
            delta.text += text
            delta.tool_calls += calls
            if self._count and delta.finish_reason == "stop":
                delta.finish_reason = "tool_calls"

    def parts(self, calls: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return whole ``calls``, names and arguments as JSON, as parts with the next indices and new ids."""
        found = [_part(self._count + place, name, arguments) for place, (name, arguments) in enumerate(calls)]
        self._count += len(found)
        return found


class HermesParser(ToolCallParser):
    """Finds ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` within a text."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        #: What may be a call: parts, because a text that grows by each of them takes the square of its length.
        self._held: list[str] = []
        self._held_characters, self._is_open, self._tail = 0, False, ""
        self._blanks: list[str] = []

    def feed(self, text: str) -> tuple[str, Sequence[dict[str, Any]]]:
        self._hold(text)
        self._tail = self._tail[1 - len(self.END) :] + text
        if self._is_open and self.END not in self._tail and self._held_characters <= self.most_characters:
            return "", ()
        held, place = self._released(), 0
        out, calls = [], []
        while (begin := held.find(self.BEGIN, place)) >= 0:
            end = held.find(self.END, begin)
            if end < 0:
                break
            end += len(self.END)
            found = read_calls(held[begin + len(self.BEGIN) : end - len(self.END)])
            out.append(self._text(held[place : begin if found else end]))
            calls += self.parts(found)
            place = end
        self._is_open = 0 <= begin >= len(held) - self.most_characters
        if not self._is_open:
            begin = len(held) - (_overlap(held[place:], self.BEGIN) if begin < 0 else 0)
        out.append(self._text(held[place:begin]))
        self._hold(held[begin:])
        return "".join(out), calls

    def end(self) -> tuple[str, Sequence[dict[str, Any]]]:
        held = self._released()
        found = read_calls(held.removeprefix(self.BEGIN)) if held.startswith(self.BEGIN) else []
        return ("", self.parts(found)) if found else (self._text(held), ())

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._held_characters += len(text)

    def _released(self) -> str:
        held = "".join(self._held)
        self._held, self._held_characters, self._is_open = [], 0, False
        return held

    def _text(self, text: str) -> str:
        """Return ``text`` for the caller. Blanks behind a call are kept back: they may be all that follows."""
        if self._count == 0:
            return text
        shown = text.rstrip()
        if not shown:
            self._blanks.append(text)
            return ""
        blanks, self._blanks = self._blanks, [text[len(shown) :]]
        return "".join(blanks) + shown


def read_calls(text: str, separator: str = "") -> list[tuple[str, str]]:
    """Return names and arguments of the calls in ``text``, which is one as JSON, or an array of them, or several with a
    ``separator``; empty if it is something else. Arguments are JSON with all digits of its numbers."""
    document = _parsed(text)
    if document is None and separator:
        documents = [_parsed(each) for each in text.split(separator) if each.strip()]
    else:
        documents = document if type(document) is list else [document]
    try:
        found = list(_named(documents))
    except (ValueError, RecursionError):
        return []
    return found if len(found) == len(documents) else []


def _named(documents: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield those of ``documents`` that are calls. Raises `ValueError` for halves of surrogate pairs and for infinity:
    they are no JSON that a client reads."""
    for each in documents:
        if type(each) is dict and type(each.get("name")) is str:
            name, given = each["name"], each.get("arguments", each.get("parameters", {}))
            arguments = given if type(given) is str else _printed(given)
            f"{name}{arguments}".encode()
            yield name, arguments


def _printed(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _part(index: int, name: str, arguments: str) -> dict[str, Any]:
    """Return the first part of a call, with a new id."""
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of ``text`` are the beginning of ``tag``."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
