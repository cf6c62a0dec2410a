"""``/v1/audio/transcriptions``: the route of models that write what they hear."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from headrace import Caller, ExtensionOperation, HeadraceError, HttpCall, HttpReply, HttpStream, InferRequest
from headrace_llm import Task
from headrace_openai.catalog import LanguageModel
from headrace_openai.descriptions import TRANSCRIPTION
from headrace_openai.forms import read_form
from headrace_openai.inferences import ending
from headrace_openai.openai_errors import BadMember, error_line, message_in
from headrace_openai.openai_route import OpenAiRoute, id_header, request_id
from headrace_openai.transcriptions import (
    print_transcription,
    read_transcription,
    transcription_events,
    transcription_request,
)

_EVENTS = (b"Content-Type", b"text/event-stream; charset=utf-8")


class Transcriptions(OpenAiRoute):
    """Return the text of a file with speech"""

    name = "POST /v1/audio/transcriptions"
    operation = ExtensionOperation("transcriptions", has_parts=True)
    openapi = TRANSCRIPTION

    async def answer(self, call: HttpCall) -> HttpReply | HttpStream:
        form, id_ = await read_form(call.request.body, call.request.headers, file="file"), request_id(call.request)
        name = form.fields.get("model", "")
        if not name:
            raise BadMember("model", "the form has no field 'model'")
        caller = await self.admit(call, name)
        with ending(caller, only_errors=True):
            asked, model = read_transcription(form), self.extension.models.find(name, Task.TRANSCRIPTION)
            request = transcription_request(asked, model, id_)
            if deadline_ns := call.caller.deadline_ns:
                request.expire_at(deadline_ns)
        if asked.streams:
            return HttpStream(200, [_EVENTS, id_header(id_)], self._events(call, request, model, caller))
        with ending(caller):
            responses = [each async for each in self.engine.responses(request, caller)]
            kind, body = print_transcription(responses, model, asked.form)
        return HttpReply(200, [(b"Content-Type", kind), id_header(id_)], [body])

    async def _events(
        self, call: HttpCall, request: InferRequest, model: LanguageModel, caller: Caller | None
    ) -> AsyncIterator[bytes]:
        has_begun = False
        try:
            events = transcription_events(self.engine.responses(request, caller), model)
            with ending(caller):
                async with aclosing(events):  # type: ignore[type-var]
                    async for event in events:
                        yield event
                        has_begun = True
        except HeadraceError as error:
            if not has_begun:
                raise  # the status says it
            yield b"data: %b\n\n" % error_line(error, message_in(call.print_error(error)))
