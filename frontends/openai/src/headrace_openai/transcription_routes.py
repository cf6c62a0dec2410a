"""The answers of ``/v1/audio/transcriptions``: models for speech."""

from __future__ import annotations

from headrace import HttpCall, HttpReply, HttpStream
from headrace_llm import Task
from headrace_openai.forms import read_form
from headrace_openai.generation_route import EVENT_HEADERS, ending_with, with_last_event
from headrace_openai.inferences import ending
from headrace_openai.openai_errors import BadMember
from headrace_openai.openai_route import OpenAiRoute, id_header, request_id
from headrace_openai.transcriptions import (
    print_transcription,
    read_transcription,
    transcription_events,
    transcription_request,
)


class TranscriptionHandler(OpenAiRoute):
    """Answers with the text of a file with speech."""

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
            events = transcription_events(self.engine.responses(request, caller), model)
            chunks = with_last_event(call, ending_with(events, caller))
            return HttpStream(200, [*EVENT_HEADERS, id_header(id_)], chunks)
        with ending(caller):
            responses = [each async for each in self.engine.responses(request, caller)]
            kind, body = print_transcription(responses, model, asked.form)
        return HttpReply(200, [(b"Content-Type", kind), id_header(id_)], [body])
