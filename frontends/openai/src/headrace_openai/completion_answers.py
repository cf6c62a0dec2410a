"""The answers to prompts, as chunks of a stream or as one document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time
from typing import Any
from uuid import uuid4

import orjson

from headrace_llm import TokenLogprob
from headrace_openai.choices import Usage
from headrace_openai.text_models import TextPart


class CompletionChunks:
    """Prints chunks of one completion as server-sent events."""

    def __init__(self, model: str, wants_usage: bool, top_logprobs: int) -> None:
        self._top = top_logprobs
        self._head = b"data: " + orjson.dumps(_head(model))[:-1]
        self._choice = self._head + b',"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]'
        self._choice += b',"usage":null}\n\n' if wants_usage else b"}\n\n"

    def print(self, index: int, part: TextPart, offset: int) -> bytes:
        """Return the chunk for ``part``, whose text begins at ``offset`` of the answer; empty if it has nothing."""
        if not (part.text or part.logprobs or part.finish_reason):
            return b""
        logprobs = orjson.dumps(logprobs_of(part.logprobs, self._top, offset)) if part.logprobs else b"null"
        reason = orjson.dumps(part.finish_reason) if part.finish_reason else b"null"
        return self._choice % (index, orjson.dumps(part.text), logprobs, reason)

    def print_usage(self, usage: Usage) -> bytes:
        """Return the last chunk."""
        return self._head + b',"choices":[],"usage":%b}\n\n' % orjson.dumps(usage.document())


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
        logprobs = logprobs_of(self._logprobs, self._top, len(self._echo)) if self._logprobs else None
        text = "".join((self._echo, *self._texts))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self._finish_reason}


def completion_document(model: str, choices: Sequence[CompletionText], usage: Usage) -> bytes:
    """Return the whole answer."""
    documents = [choice.document(index) for index, choice in enumerate(choices)]
    return orjson.dumps({**_head(model), "choices": documents, "usage": usage.document()})


def logprobs_of(logprobs: Sequence[TokenLogprob], most: int, offset: int) -> Mapping[str, Any]:
    """Return ``logprobs`` in the form of a completion, each with at most ``most`` alternatives beside the token."""
    offsets = []
    for each in logprobs:
        offsets.append(offset)
        offset += len(each.text)
    return {
        "tokens": [each.text for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [
            {**{text: value for _, text, value in each.top[:most]}, each.text: each.logprob} for each in logprobs
        ],
        "text_offset": offsets,
    }


def _head(model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time()), "model": model}
