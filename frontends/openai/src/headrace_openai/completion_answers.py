"""The answers to prompts, as chunks of a stream or as one document."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from time import time
from typing import Any
from uuid import uuid4

import orjson

from headrace_llm import TokenLogprob, token_bytes
from headrace_openai.choices import Usage
from headrace_openai.event_lines import event_line
from headrace_openai.text_responses import TextPart


class TokenOffsets:
    """Counts the characters before each token of one text. A character of several tokens begins with each of them."""

    def __init__(self) -> None:
        self._place = 0
        self._decode = getincrementaldecoder("utf-8")("replace").decode

    def take(self, token: str) -> int:
        """Return where ``token``, the next one, begins."""
        place = self._place
        self._place += len(self._decode(token_bytes(token)))
        return place


class CompletionChunks:
    """Prints chunks of one completion as server-sent events."""

    def __init__(self, model: str, wants_usage: bool, top_logprobs: int) -> None:
        self._top = top_logprobs
        self._head = b"data: " + event_line(_head(model))[:-1]
        self._choice = self._head + b',"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]'
        self._choice += b',"usage":null}\n\n' if wants_usage else b"}\n\n"

    def print(self, index: int, part: TextPart, offsets: TokenOffsets) -> bytes:
        """Return the chunk for ``part`` of the text with ``offsets``; empty if it has nothing."""
        if not (part.text or part.logprobs or part.finish_reason):
            return b""
        logprobs = event_line(logprobs_of(part.logprobs, self._top, offsets)) if part.logprobs else b"null"
        reason = event_line(part.finish_reason) if part.finish_reason else b"null"
        return self._choice % (index, event_line(part.text), logprobs, reason)

    def print_usage(self, usage: Usage) -> bytes:
        """Return the last chunk."""
        return self._head + b',"choices":[],"usage":%b}\n\n' % event_line(usage.document())


class CompletionText:
    """Gathers one answer, which begins with ``echo``."""

    def __init__(self, echo: str, top_logprobs: int) -> None:
        self._echo, self._top = echo, top_logprobs
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason = ""

    def add(self, part: TextPart) -> None:
        """Append ``part``."""
        self._texts.append(part.text)
        self._logprobs += part.logprobs
        self._finish_reason = part.finish_reason or self._finish_reason

    def document(self, index: int) -> dict[str, Any]:
        """Return the choice."""
        logprobs = logprobs_of(self._logprobs, self._top, TokenOffsets()) if self._logprobs else None
        text = "".join((self._echo, *self._texts))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self._finish_reason}


def completion_document(model: str, choices: Sequence[CompletionText], usage: Usage) -> bytes:
    """Return the whole answer."""
    documents = [choice.document(index) for index, choice in enumerate(choices)]
    return orjson.dumps({**_head(model), "choices": documents, "usage": usage.document()})


def logprobs_of(logprobs: Sequence[TokenLogprob], most: int, offsets: TokenOffsets) -> Mapping[str, Any]:
    """Return ``logprobs`` in the form of a completion, each with at most ``most`` alternatives beside the token."""
    return {
        "tokens": [_shown(each.text) for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [
            {**{_shown(text): value for _, text, value in each.top[:most]}, _shown(each.text): each.logprob}
            for each in logprobs
        ],
        "text_offset": [offsets.take(each.text) for each in logprobs],
    }


def _shown(token: str) -> str:
    """Return ``token`` as OpenAI's completions have it: one that is no whole characters by its bytes."""
    data = token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _head(model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time()), "model": model}
