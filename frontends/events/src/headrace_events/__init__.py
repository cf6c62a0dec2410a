"""Server-sent events: ``POST /v2/models/{name}/events`` is an infer request, whose responses are events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from headrace import Extension, HeadraceError, HttpCall, HttpRoute, HttpStream, InferRequest, hookimpl

_HEADERS = ((b"Content-Type", b"text/event-stream"), (b"Cache-Control", b"no-store"))


class EventsRoute(HttpRoute):
    name = "POST /v2/models/{name}[/versions/{version}]/events"

    async def answer(self, call: HttpCall) -> HttpStream:
        request = await call.read_inference(call.values["name"], call.values.get("version", ""))
        return HttpStream(200, _HEADERS, self._events(call, request))

    async def _events(self, call: HttpCall, request: InferRequest) -> AsyncIterator[bytes]:
        has_begun = False
        try:
            async for response in self.engine.responses(request, call.caller):
                yield b"data: %b\n\n" % await call.print_response(response)
                has_begun = True
        except HeadraceError as error:
            if not has_begun:
                raise  # the status says it
            yield b"event: error\ndata: %b\n\n" % call.print_error(error)


class Events(Extension):
    name = "events"
    adds = (EventsRoute,)


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [Events]
