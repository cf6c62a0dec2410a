"""Triton's generate extension: a flat JSON object in, the outputs of the model as JSON or server-sent events out.

Source: docs/spec/behaviours.md section 1.4.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from headrace import (
    Addition,
    Extension,
    HeadraceError,
    HttpCall,
    HttpReply,
    HttpRoute,
    HttpStream,
    InferRequest,
    InternalError,
    InvalidArgument,
    Operation,
    hookimpl,
)
from headrace_generate.load_metrics import load_metrics
from headrace_generate.requests import read_request
from headrace_generate.responses import print_response

_JSON = (b"Content-Type", b"application/json")
_EVENTS = (b"Content-Type", b"text/event-stream; charset=utf-8")
_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)


class GenerateRoute(HttpRoute):
    """Answers with the one response of a model, as one JSON object."""

    name = "POST /v2/models/{name}[/versions/{version}]/generate"
    operation = Operation.GENERATE

    async def answer(self, call: HttpCall) -> HttpReply | HttpStream:
        request = await _request(self, call)
        printed: list[bytes] = []
        async for response in self.engine.responses(request, call.caller):
            if printed:
                break
            printed.append(await print_response(call, response, request.id))
        else:
            if printed:
                return HttpReply(200, [_JSON, *_more_headers(self, call)], printed)
        raise InternalError(_NOT_ONE)


class GenerateStreamRoute(HttpRoute):
    """Answers with an event for each response of a model."""

    name = "POST /v2/models/{name}[/versions/{version}]/generate_stream"
    operation = Operation.GENERATE

    async def answer(self, call: HttpCall) -> HttpReply | HttpStream:
        request = await _request(self, call)
        return HttpStream(200, [_EVENTS, *_more_headers(self, call)], self._events(call, request))

    async def _events(self, call: HttpCall, request: InferRequest) -> AsyncIterator[bytes]:
        has_begun = False
        try:
            async for response in self.engine.responses(request, call.caller, with_errors=True):
                if not isinstance(response, HeadraceError):
                    yield b"data: %b\n\n" % await print_response(call, response, request.id)
                elif has_begun:
                    yield b"data: %b\n\n" % call.print_error(response)
                else:
                    raise response
                has_begun = True
        except HeadraceError as error:
            if not has_begun:
                raise  # the status says it
            yield b"data: %b\n\n" % call.print_error(error)


async def _request(route: HttpRoute, call: HttpCall) -> InferRequest:
    name, version = call.values["name"], call.values.get("version", "")
    model = route.engine.resolve(name, version)
    if call.request.headers.get(b"content-encoding", b"identity") != b"identity":
        raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
    return read_request(call, await call.read_json(), name, version, model)


def _more_headers(route: HttpRoute, call: HttpCall) -> Sequence[tuple[bytes, bytes]]:
    wanted = call.request.headers.get(b"endpoint-load-metrics-format")
    value = load_metrics(wanted, route.engine.collect()) if wanted else None
    return [(b"endpoint-load-metrics", value)] if value else []


class Generate(Extension):
    name = "generate"
    adds: ClassVar[tuple[type[Addition], ...]] = (GenerateRoute, GenerateStreamRoute)


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [Generate]
