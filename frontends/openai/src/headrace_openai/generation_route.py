"""The base of the routes for text: admission of each choice, and a stream of events that may fail in the middle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from headrace import Caller, HeadraceError, HttpCall, HttpReply, HttpStream
from headrace_llm import Task
from headrace_openai.body_members import flag, members, whole
from headrace_openai.choices import stopping
from headrace_openai.inferences import ending
from headrace_openai.openai_errors import BadMember, error_line, message_in
from headrace_openai.openai_route import (
    SMALL_BYTES,
    OpenAiRoute,
    id_header,
    model_name,
    off_loop,
    read_body,
    request_id,
)
from headrace_openai.text_models import Prompt, TextModel, TextRequest
from headrace_openai.text_responses import TextPart, parts_of

EVENT_HEADERS = (
    (b"Content-Type", b"text/event-stream; charset=utf-8"),
    (b"Cache-Control", b"no-store"),
    (b"X-Accel-Buffering", b"no"),
)
_DONE = b"data: [DONE]\n\n"
#: The most bytes of a body, times the number of answers to each of its prompts.
_MOST_COPIED_BYTES = 256 << 20
#: The largest number that a priority has in a request.
_MOST_PRIORITY = 2**32 - 1


@dataclass(frozen=True, slots=True)
class TextCall:
    """A request whose model is found. ``caller`` is admitted for it; None if the server has no interceptors.

    ``document`` is its body, ``named`` what it calls the model, with the ``adapter``, and ``sent_as`` its id. If it
    ``is_small``, the event loop may read its texts.
    """

    http: HttpCall
    document: dict[str, Any]
    model: TextModel
    named: str
    adapter: str
    caller: Caller | None
    sent_as: str

    is_small: bool = False


class GenerationRoute(OpenAiRoute):
    """A route that generates text."""

    async def answer(self, call: HttpCall) -> HttpReply | HttpStream:
        document = await read_body(call)
        named = model_name(document)
        name, adapter = self.extension.models.split(named)
        caller = await self.admit(call, name)
        with ending(caller, only_errors=True):
            model = self.extension.models.find(name, Task.GENERATION).text_model
            assert model is not None
            sent_as = request_id(call.request)
            is_small = call.request.body.nbytes <= SMALL_BYTES
            answer = await self.generate(TextCall(call, document, model, named, adapter, caller, sent_as, is_small))
        if caller is None:
            return answer
        if isinstance(answer, HttpStream):
            return answer._replace(chunks=ending_with(answer.chunks, caller))
        caller.end()
        return answer

    async def generate(self, call: TextCall) -> HttpReply | HttpStream:
        """Return the answer to ``call``."""
        raise NotImplementedError

    async def parts(self, call: TextCall, wanted: Sequence[TextRequest], count: int) -> list[AsyncIterator[TextPart]]:
        """Return ``count`` answers to each of ``wanted``. Raises `BadMember` for what the model can not do.

        The first is that of the caller. Each other one is admitted when it begins: it may have to wait until the first
        one ends.
        """
        copied = count * call.http.request.body.nbytes
        if count > 1 and copied > _MOST_COPIED_BYTES:  # a process of a model gets a copy for each answer
            raise BadMember(
                "n",
                f"n is {count}: so many times the bytes of the body must be at most {_MOST_COPIED_BYTES}, not {copied}",
            )
        inputs = await off_loop(
            self.engine, call.is_small, lambda: [call.model.prompt_inputs(one.prompt) for one in wanted]
        )
        requests = [
            call.model.request(one, given, call.sent_as, number)
            for one, given in zip(wanted, inputs, strict=True)
            for number in range(count)
        ]
        others = None if call.caller is None else call.http.caller
        first, *rest = requests
        answers = [
            parts_of(self.engine, first, call.caller),
            *[parts_of(self.engine, request, others) for request in rest],
        ]
        stop = wanted[0].sampling.get("stop")
        if not stop or wanted[0].sampling.get("include_stop_str_in_output"):
            return answers
        return [stopping(parts, [stop] if type(stop) is str else stop) for parts in answers]


def text_request(call: TextCall, prompt: Prompt, sampling: Mapping[str, Any], stream: bool) -> TextRequest:
    """Return the request of ``call`` with ``prompt``."""
    priority = whole(call.document, "priority", 0, _MOST_PRIORITY, 0)
    return TextRequest(prompt, sampling, stream, priority, call.http.caller.deadline_ns)


def wants_stream(document: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return the members ``stream`` and ``stream_options.include_usage``."""
    stream = flag(document, "stream")
    options = members(document, "stream_options", "stream_options")
    if options and not stream:
        raise BadMember("stream_options", "stream_options needs stream to be true")
    return stream, flag(options, "include_usage")


def event_stream(call: TextCall, events: AsyncIterator[bytes]) -> HttpStream:
    """Return ``events`` as the answer, with ``[DONE]`` as the last. An error in the middle is the last event."""
    return HttpStream(200, [*EVENT_HEADERS, id_header(call.sent_as)], with_last_event(call.http, events, _DONE))


async def ending_with(chunks: AsyncIterator[bytes], caller: Caller | None) -> AsyncIterator[bytes]:
    """Yield ``chunks``, and end the operation of ``caller`` with the last."""
    with ending(caller):
        async with aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk


async def with_last_event(call: HttpCall, events: AsyncIterator[bytes], last: bytes = b"") -> AsyncIterator[bytes]:
    """Yield ``events``, and then ``last``. An error in the middle is the last event."""
    has_begun = False
    try:
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                yield event
                has_begun = True
    except HeadraceError as error:
        if not has_begun:
            raise  # it sets the status
        yield b"data: %b\n\n" % error_line(error, message_in(call.print_error(error)))
    else:
        yield last
