"""The answers of ``/v1/responses``: a chat in OpenAI's newer form, without what needs a store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson

from headrace import Code, HeadraceError, HttpCall, HttpReply, HttpStream
from headrace_openai.body_members import flag
from headrace_openai.chat_routes import Chat, ChatRoute
from headrace_openai.choices import Usage, numbered
from headrace_openai.event_lines import event_line
from headrace_openai.generation_route import EVENT_HEADERS, TextCall
from headrace_openai.openai_errors import message_in
from headrace_openai.openai_route import id_header, json_answer
from headrace_openai.response_items import ResponseItems
from headrace_openai.response_requests import chat_document


class ResponseHandler(ChatRoute):
    """Answers in the form of responses."""

    async def generate(self, call: TextCall) -> HttpReply | HttpStream:
        stream = flag(call.document, "stream")
        chat = await self.begin(replace(call, document=chat_document(call.document)), 1, stream)
        del call.document["input"]  # an answer may take minutes, and needs no large texts
        items = ResponseItems(call.document, call.named, chat.top_logprobs)
        if stream:
            return HttpStream(200, [*EVENT_HEADERS, id_header(call.sent_as)], _events(call.http, chat, items))
        async for _ in _items(chat, items):
            pass
        return json_answer(orjson.dumps(items.document), call.sent_as)


async def _items(chat: Chat, items: ResponseItems) -> AsyncIterator[Iterable[dict[str, Any]]]:
    """Yield the events for each part. The first events wait for the first part: an error before it sets the status."""
    usage, begins = Usage(), True
    async with aclosing(numbered(chat.parts)) as arriving:  # type: ignore[type-var]
        async for _, part in arriving:
            if begins:
                yield [*items.begin()]
                begins = False
            usage.add(0, part)
            yield [*items.add(chat.choices[0].take(part))]
    yield [*items.end(usage)]


async def _events(call: HttpCall, chat: Chat, items: ResponseItems) -> AsyncIterator[bytes]:
    has_begun = False
    try:
        async with aclosing(_items(chat, items)) as arriving:  # type: ignore[type-var]
            async for events in arriving:
                if printed := b"".join(map(_print, events)):
                    yield printed
                    has_begun = True
    except HeadraceError as error:
        if not has_begun:
            raise  # it sets the status
        code = "rate_limit_exceeded" if error.code is Code.RESOURCE_EXHAUSTED else "server_error"
        yield _print(items.fail(code, message_in(call.print_error(error))))


def _print(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), event_line(event))
