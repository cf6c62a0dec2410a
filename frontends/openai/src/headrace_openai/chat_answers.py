"""The answers to a chat, as chunks of a stream or as one document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time
from typing import Any
from uuid import uuid4

import orjson

from headrace_llm import TokenLogprob, ToolCallParser, token_bytes
from headrace_openai.choices import Usage
from headrace_openai.event_lines import event_line
from headrace_openai.text_responses import TextPart

_NULL = b"null"


class ChatChoice:
    """One answer while it arrives: its tool calls are found, and made complete."""

    __slots__ = ("_has_one_call", "_ids", "_parser", "has_begun")

    def __init__(self, parser: ToolCallParser | None, has_one_call: bool) -> None:
        self._parser, self._has_one_call = parser, has_one_call
        self._ids: dict[int, str] = {}
        #: True once a chunk of it was sent.
        self.has_begun = False

    def take(self, part: TextPart) -> TextPart:
        """Return ``part`` with its tool calls out of its text."""
        if self._parser is not None:
            part.text, part.tool_calls = self._parser.feed(part.text)
            if part.finish_reason:
                text, calls = self._parser.end()
                part.text, part.tool_calls = part.text + text, [*part.tool_calls, *calls]
        if part.tool_calls:
            calls = [self._complete(call) for call in part.tool_calls]
            part.tool_calls = [call for call in calls if call["index"] == 0] if self._has_one_call else calls
        if part.finish_reason == "stop" and self._ids:
            part.finish_reason = "tool_calls"
        return part

    def _complete(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a part of a call with an index, and with an id if it is its first."""
        index = call.setdefault("index", 0)
        if index not in self._ids:
            self._ids[index] = call["id"] = call.get("id") or f"call_{uuid4().hex[:24]}"
            call["type"] = "function"
        return call


class ChatChunks:
    """Prints chunks of one chat as server-sent events."""

    def __init__(self, model: str, wants_usage: bool, top_logprobs: int) -> None:
        self._top = top_logprobs
        head = {"id": new_id(), "object": "chat.completion.chunk", "created": int(time()), "model": model}
        self._head = b"data: " + event_line(head)[:-1]
        self._choice = self._head + b',"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]'
        self._choice += b',"usage":null}\n\n' if wants_usage else b"}\n\n"

    def print(self, index: int, choice: ChatChoice, part: TextPart) -> bytes:
        """Return the chunks for ``part``; empty if it has nothing for the caller."""
        chunks = b""
        if not choice.has_begun:
            choice.has_begun = True
            chunks = self._choice % (index, b'{"role":"assistant","content":""}', _NULL, _NULL)
        if part.reasoning:
            chunks += self._choice % (index, b'{"reasoning_content":%b}' % event_line(part.reasoning), _NULL, _NULL)
        if part.text or part.logprobs:
            logprobs = event_line(logprobs_of(part.logprobs, self._top)) if part.logprobs else _NULL
            chunks += self._choice % (index, b'{"content":%b}' % event_line(part.text), logprobs, _NULL)
        if part.tool_calls:
            chunks += self._choice % (index, b'{"tool_calls":%b}' % event_line(part.tool_calls), _NULL, _NULL)
        if part.finish_reason:
            chunks += self._choice % (index, b"{}", _NULL, event_line(part.finish_reason))
        return chunks

    def print_usage(self, usage: Usage) -> bytes:
        """Return the last chunk."""
        return self._head + b',"choices":[],"usage":%b}\n\n' % event_line(usage.document())


class ChatText:
    """Gathers one answer."""

    def __init__(self, top_logprobs: int) -> None:
        self._top = top_logprobs
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        #: By index, the members of each call, and the parts of its function's members.
        self._calls: dict[int, tuple[dict[str, Any], dict[str, list[str]]]] = {}
        self._finish_reason = ""

    def add(self, part: TextPart) -> None:
        """Append ``part``."""
        self._texts.append(part.text)
        self._reasoning.append(part.reasoning)
        self._logprobs += part.logprobs
        for call in part.tool_calls:
            members, function = self._calls.setdefault(call["index"], ({}, {"name": [], "arguments": []}))
            members |= {name: call[name] for name in ("id", "type") if name in call}
            for name, text in (call.get("function") or {}).items():
                function.setdefault(name, []).append(text or "")
        self._finish_reason = part.finish_reason or self._finish_reason

    def document(self, index: int) -> dict[str, Any]:
        """Return the choice."""
        text, reasoning = "".join(self._texts), "".join(self._reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["content"] = text or None
            message["tool_calls"] = [_call(*self._calls[place]) for place in sorted(self._calls)]
        logprobs = logprobs_of(self._logprobs, self._top) if self._logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}


def _call(members: Mapping[str, Any], function: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    return {**members, "function": {name: "".join(texts) for name, texts in function.items()}}


def chat_document(model: str, choices: Sequence[ChatText], usage: Usage) -> bytes:
    """Return the whole answer to a chat."""
    return orjson.dumps(
        {
            "id": new_id(),
            "object": "chat.completion",
            "created": int(time()),
            "model": model,
            "choices": [choice.document(index) for index, choice in enumerate(choices)],
            "usage": usage.document(),
        }
    )


def logprobs_of(logprobs: Sequence[TokenLogprob], most: int) -> Mapping[str, Any]:
    """Return ``logprobs`` in the form of a chat, each with at most ``most`` alternatives."""
    content = []
    for each in logprobs:
        top = [_token(text, logprob) for _, text, logprob in each.top[:most]]
        content.append({**_token(each.text, each.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def new_id() -> str:
    return f"chatcmpl-{uuid4().hex}"


def _token(text: str, logprob: float) -> dict[str, Any]:
    data = token_bytes(text)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
