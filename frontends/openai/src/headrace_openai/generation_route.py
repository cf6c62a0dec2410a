"""What the routes for text share: admission of each choice, and a stream of events that may fail in the middle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from headrace import Caller, HeadraceError, HttpCall, HttpReply, HttpStream
from headrace_llm import Task
from headrace_openai.body_members import flag, members, whole
from headrace_openai.catalog import LanguageModel
from headrace_openai.inferences import ending
from headrace_openai.openai_errors import BadMember, error_line, message_in
from headrace_openai.openai_route import OpenAiRoute, id_header, model_name, read_body
from headrace_openai.text_models import Asked, Prompt, TextPart, parts_of

EVENT_HEADERS = (
    (b"Content-Type", b"text/event-stream; charset=utf-8"),
    (b"Cache-Control", b"no-store"),
    (b"X-Accel-Buffering", b"no"),
)
_DONE = b"data: [DONE]\n\n"
#: The largest number that a priority has in a request.
_MOST_PRIORITY = 2**32 - 1


class GenerationRoute(OpenAiRoute):
    """A route that generates text."""

    async def answer(self, call: HttpCall) -> HttpReply | HttpStream:
        document = await read_body(call)
        named = model_name(document)
        name, adapter = self.extension.models.split(named)
        caller = await self.admit(call, name)
        with ending(caller, only_errors=True):
            model = self.extension.models.find(name, Task.GENERATION)
            answer = await self.generate(call, document, model, named, adapter, caller)
        if caller is None:
            return answer
        if isinstance(answer, HttpStream):
            return answer._replace(chunks=_ended(answer.chunks, caller))
        caller.end()
        return answer

    async def generate(
        self,
        call: HttpCall,
        document: dict[str, Any],
        model: LanguageModel,
        named: str,
        adapter: str,
        caller: Caller | None,
    ) -> HttpReply | HttpStream:
        """Return the answer of ``model``, which the caller calls ``named``. ``caller`` is admitted for it."""
        raise NotImplementedError

    def parts(
        self,
        call: HttpCall,
        model: LanguageModel,
        asked: Sequence[Asked],
        count: int,
        caller: Caller | None,
        request_id: str,
    ) -> list[AsyncIterator[TextPart]]:
        """Return ``count`` answers to each of ``asked``. Raises `BadMember` for what the model can not do.

        The first is that of ``caller``. Each other one is admitted when it begins: it may have to wait until the first
        one ends.
        """
        requests = [model.text.request(one, request_id, number) for one in asked for number in range(count)]
        others = None if caller is None else call.caller
        first, *rest = requests
        return [
            parts_of(self.engine, first, caller),
            *[parts_of(self.engine, request, others) for request in rest],
        ]


def asked_of(
    call: HttpCall, document: Mapping[str, Any], prompt: Prompt, sampling: Mapping[str, Any], stream: bool
) -> Asked:
    """Return what ``document`` asks for ``prompt``."""
    priority = whole(document, "priority", 0, _MOST_PRIORITY, 0)
    return Asked(prompt, sampling, stream, priority, call.caller.deadline_ns)


def wants_stream(document: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return the members ``stream`` and ``stream_options.include_usage``."""
    stream = flag(document, "stream")
    options = members(document, "stream_options", "stream_options")
    if options and not stream:
        raise BadMember("stream_options", "stream_options needs stream to be true")
    return stream, flag(options, "include_usage")


def event_stream(call: HttpCall, events: AsyncIterator[bytes], request_id: str) -> HttpStream:
    """Return ``events`` as the answer, with ``[DONE]`` as the last. An error in the middle is the last event."""
    return HttpStream(200, [*EVENT_HEADERS, id_header(request_id)], _closed(call, events))


async def _ended(chunks: AsyncIterator[bytes], caller: Caller) -> AsyncIterator[bytes]:
    """Yield ``chunks``, and end the operation of ``caller`` with the last."""
    with ending(caller):
        async with aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk


async def _closed(call: HttpCall, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    has_begun = False
    try:
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                yield event
                has_begun = True
    except HeadraceError as error:
        if not has_begun:
            raise  # the status says it
        yield b"data: %b\n\n" % error_line(error, message_in(call.print_error(error)))
    else:
        yield _DONE
