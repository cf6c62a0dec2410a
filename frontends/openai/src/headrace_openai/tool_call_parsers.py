"""Tool calls in the text of a model: found while the text arrives.

A model declares how it writes them by the parameter ``tool_call_parser``:

- ``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` within the text
- ``llama3_json``: the whole text is ``{"name": ..., "parameters": {...}}``; several are separated by ``;``
- ``mistral``: ``[TOOL_CALLS]`` and an array, or ``[TOOL_CALLS]name[ARGS]{...}``

What is not such a call, or longer than `MOST_CHARACTERS`, is text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final
from uuid import uuid4

import orjson

#: The longest text in which a call is searched.
MOST_CHARACTERS = 1 << 20
#: The result of `ToolCallParser.feed`: text for the caller, and parts of calls as in a chat completion chunk.
Found = tuple[str, Sequence[dict[str, Any]]]
_NOTHING: Found = ("", ())


class ToolCallParser(ABC):
    """Finds the calls in one text."""

    def __init__(self) -> None:
        self._held = ""
        self._count = 0

    @abstractmethod
    def feed(self, text: str) -> Found:
        """Take the next ``text``. Return what is certain by now."""

    @abstractmethod
    def end(self) -> Found:
        """Return the rest."""

    def _calls(self, calls: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return whole ``calls``, names and arguments as JSON, as parts with the next indices."""
        found = [call_part(self._count + place, name, arguments) for place, (name, arguments) in enumerate(calls)]
        self._count += len(found)
        return found


class HermesParser(ToolCallParser):
    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._blanks = ""

    def feed(self, text: str) -> Found:
        held = self._held + text
        out, calls = [], []
        while (begin := held.find(self._BEGIN)) >= 0:
            end = held.find(self._END, begin)
            if end < 0:
                break
            end += len(self._END)
            found = read_calls(held[begin + len(self._BEGIN) : end - len(self._END)])
            out.append(self._text(held[: begin if found else end]))
            calls += self._calls(found)
            held = held[end:]
        if begin < 0:
            begin = len(held) - _overlap(held, self._BEGIN)
        elif len(held) - begin > MOST_CHARACTERS:
            begin = len(held)
        out.append(self._text(held[:begin]))
        self._held = held[begin:]
        return "".join(out), calls

    def end(self) -> Found:
        held, self._held = self._held, ""
        found = read_calls(held.removeprefix(self._BEGIN)) if held.startswith(self._BEGIN) else []
        return ("", self._calls(found)) if found else (self._text(held), ())

    def _text(self, text: str) -> str:
        """Return ``text`` for the caller. Blanks behind a call are kept back: they may be all that follows."""
        if self._count == 0:
            return text
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        return shown


class _WholeTextParser(ToolCallParser):
    """For calls that are the whole text: it is held if it begins like one."""

    _beginnings: tuple[str, ...]

    def __init__(self) -> None:
        super().__init__()
        self._is_text = False

    def feed(self, text: str) -> Found:
        if self._is_text:
            return text, ()
        self._held += text
        begun = self._held.lstrip()
        if len(self._held) <= MOST_CHARACTERS and any(
            begun.startswith(each) or each.startswith(begun) for each in self._beginnings
        ):
            return _NOTHING
        self._is_text = True
        held, self._held = self._held, ""
        return held, ()

    def end(self) -> Found:
        held, self._held = self._held, ""
        found = self._read(held.strip())
        return ("", self._calls(found)) if found else (held, ())

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
            if not name.strip() or type(_parsed(arguments)) is not dict:
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
        self._name = name

    def feed(self, text: str) -> Found:
        if not text:
            return _NOTHING
        if self._count == 0:
            return "", self._calls([(self._name, text)])
        return "", [{"index": 0, "function": {"arguments": text}}]

    def end(self) -> Found:
        return _NOTHING


#: The parsers by the value of the model parameter.
PARSERS: Final[dict[str, type[ToolCallParser]]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}


def call_part(index: int, name: str, arguments: str) -> dict[str, Any]:
    """Return the first part of a call, with a new id."""
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def read_calls(text: str, separator: str = "") -> list[tuple[str, str]]:
    """Return names and arguments of the calls in ``text``, which is one as JSON, or an array of them, or several with a
    ``separator``; empty if it is something else."""
    document = _parsed(text)
    if document is None and separator:
        documents = [_parsed(each) for each in text.split(separator) if each.strip()]
    else:
        documents = document if type(document) is list else [document]
    found = list(_named(documents))
    return found if len(found) == len(documents) else []


def _named(documents: Sequence[Any]) -> Iterator[tuple[str, str]]:
    for each in documents:
        if type(each) is dict and type(each.get("name")) is str:
            arguments = each.get("arguments", each.get("parameters", {}))
            yield each["name"], arguments if type(arguments) is str else orjson.dumps(arguments).decode()


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of ``text`` are the beginning of ``tag``."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
