"""From the parts of an answer to the items and the events of ``/v1/responses``, in OpenAI's order.

::

    created, in_progress                                  begin
    output_item.added, content_part.added                 the first part of an item
    output_text.delta, ...                                each part
    output_text.done, content_part.done, output_item.done the first part of another item, or the end
    completed, incomplete or failed                       end

Source: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import time
from typing import Any
from uuid import uuid4

from headrace_llm import TokenLogprob
from headrace_openai.chat_answers import logprobs_of
from headrace_openai.choices import Usage
from headrace_openai.text_responses import TextPart

#: Members of the request that the response repeats, and their defaults.
_REPEATED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "user": None,
}
#: By finish reason, why a response is incomplete.
_INCOMPLETE = {"length": "max_output_tokens"}
#: The words of an item's text in events and documents.
_TEXT = ("message", "output_text")
_REASONING = ("reasoning", "reasoning_text")
_PREFIXES = {"message": "msg", "reasoning": "rs"}


class ResponseItems:
    """One response while it is generated. Each method returns the new events, with their numbers."""

    def __init__(self, asked: Mapping[str, Any], model: str, top_logprobs: int = 0) -> None:
        """Create the response of ``model`` to ``asked``, the body of the request.

        Log probabilities have at most ``top_logprobs`` alternatives.
        """
        self._top = top_logprobs
        self._document: dict[str, Any] = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **{name: default if asked.get(name) is None else asked[name] for name, default in _REPEATED.items()},
        }
        self._number = 0
        self._item: dict[str, Any] | None = None
        #: By index, each call and the parts of its arguments.
        self._calls: dict[int, tuple[dict[str, Any], list[str]]] = {}
        #: The parts of the item that is open: of its text, or of its arguments.
        self._texts: list[str] = []
        #: Of the tokens of the text that is open, and of tokens whose text is still to come.
        self._logprobs: list[Any] = []
        self._pending: list[TokenLogprob] = []
        self._reason = ""

    @property
    def document(self) -> Mapping[str, Any]:
        """The response as it is now."""
        return self._document

    def begin(self) -> Iterator[dict[str, Any]]:
        yield self._whole("response.created")
        yield self._whole("response.in_progress")

    def add(self, part: TextPart) -> Iterator[dict[str, Any]]:
        """Add ``part``, which is new in the answer."""
        if part.reasoning:
            yield from self._add_text(_REASONING, part.reasoning)
        elif not part.tool_calls:
            self._pending += part.logprobs
        if part.text:
            yield from self._add_text(_TEXT, part.text)
        for call in part.tool_calls:
            yield from self._add_call(call)
        self._reason = part.finish_reason or self._reason

    def end(self, usage: Usage) -> Iterator[dict[str, Any]]:
        """End the response."""
        incomplete = _INCOMPLETE.get(self._reason)
        status = "incomplete" if incomplete else "completed"
        yield from self._close(status)
        for item, arguments in self._calls.values():  # an engine may have added some after the next item
            item["arguments"] = "".join(arguments)
        self._document |= {"status": status, "completed_at": None if incomplete else int(time())}
        if incomplete:
            self._document["incomplete_details"] = {"reason": incomplete}
        self._document["usage"] = {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        }
        yield self._whole(f"response.{status}")

    def fail(self, code: str, message: str) -> dict[str, Any]:
        """End the response with an error."""
        self._document |= {"status": "failed", "error": {"code": code, "message": message}}
        return self._whole("response.failed")

    # ------------------------------------------------------------------ items

    def _add_text(self, words: tuple[str, str], text: str) -> Iterator[dict[str, Any]]:
        kind, name = words
        if self._item is None or self._item["type"] != kind:
            yield from self._open_text(kind, name)
        assert self._item is not None
        self._texts.append(text)
        delta = self._event(f"response.{name}.delta", content_index=0, delta=text)
        yield delta | {"logprobs": self._take_logprobs()} if kind == "message" else delta

    def _take_logprobs(self) -> list[Any]:
        """Return the new log probabilities of the text that is open."""
        found = list(logprobs_of(self._pending, self._top)["content"])
        self._pending = []
        self._logprobs += found
        return found

    def _open_text(self, kind: str, name: str) -> Iterator[dict[str, Any]]:
        item: dict[str, Any] = {
            "id": f"{_PREFIXES[kind]}_{uuid4().hex}",
            "type": kind,
            "status": "in_progress",
            "content": [],
        }
        item["role" if kind == "message" else "summary"] = "assistant" if kind == "message" else []
        yield from self._open(item)
        self._texts, self._logprobs = [], []
        yield self._event("response.content_part.added", content_index=0, part=_part(name, ""))

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        function = call.get("function") or {}
        index, arguments = call.get("index", len(self._calls)), function.get("arguments") or ""
        if index not in self._calls:
            call_id = call.get("id") or f"call_{uuid4().hex}"
            item = {
                "id": f"fc_{uuid4().hex}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": call_id,
                "name": function.get("name") or "",
                "arguments": "",
            }
            yield from self._open(item)
            self._texts = []
            self._calls[index] = item, self._texts
        item, texts = self._calls[index]
        texts.append(arguments)
        if arguments and item is self._item:
            yield self._event("response.function_call_arguments.delta", delta=arguments)

    def _open(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Close the item that is open, and begin ``item``."""
        yield from self._close("completed")
        self._item = item
        self._document["output"].append(item)
        yield self._event("response.output_item.added", item=dict(item))

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        item = self._item
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = "".join(self._texts)
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **done)
        else:
            name = _TEXT[1] if item["type"] == "message" else _REASONING[1]
            text = "".join(self._texts)
            done = self._event(f"response.{name}.done", content_index=0, text=text)
            if name == _TEXT[1]:
                self._take_logprobs()
                done["logprobs"] = self._logprobs
            item["content"] = [_part(name, text, self._logprobs)]
            yield done
            yield self._event("response.content_part.done", content_index=0, part=item["content"][0])
        yield self._event("response.output_item.done", item=dict(item))
        self._item = None

    # ------------------------------------------------------------------ events

    def _event(self, kind: str, **members: Any) -> dict[str, Any]:
        """Return an event about the item that is open."""
        assert self._item is not None
        if "item" not in members:
            members["item_id"] = self._item["id"]
        members["output_index"] = len(self._document["output"]) - 1
        return self._numbered(kind, members)

    def _whole(self, kind: str) -> dict[str, Any]:
        return self._numbered(kind, {"response": self._document | {"output": list(self._document["output"])}})

    def _numbered(self, kind: str, members: dict[str, Any]) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **members}


def _part(name: str, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return (
        {"type": name, "text": text, "annotations": [], "logprobs": logprobs}
        if name == _TEXT[1]
        else {"type": name, "text": text}
    )
