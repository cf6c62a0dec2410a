"""The base of all routes of OpenAI: the body, the model, request ids, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from uuid import uuid4

from headrace import (
    Caller,
    CallerError,
    Engine,
    HeadraceError,
    HttpCall,
    HttpReply,
    HttpRequest,
    HttpRoute,
    InvalidArgument,
    Operation,
)
from headrace_openai.language_models import LanguageModels
from headrace_openai.openai_errors import BadMember, as_openai

_JSON = (b"Content-Type", b"application/json")
_REQUEST_ID = b"x-request-id"
_LONGEST_ID = 128
#: The longest name of a model with an adapter, in characters: errors and logs repeat it.
_LONGEST_NAME = 1024
#: Texts of a larger body are copied on a thread.
SMALL_BYTES = 64 * 1024
T = TypeVar("T")


class OpenAiRoute(HttpRoute):
    """A route whose errors are OpenAI's."""

    refusal_prefix = "/v1/"
    extension: LanguageModels

    @property
    def max_body_bytes(self) -> int | None:
        return self.extension.settings.max_body_bytes

    def refusal(self, error: HeadraceError, usual: HttpReply, request: HttpRequest) -> HttpReply:
        return refusal(error, usual, request)

    async def admit(self, call: HttpCall, model: str) -> Caller | None:
        """Admit an inference with ``model``, which the body names. None if the server has no interceptors.

        Raises the error that refuses it. `Caller.end` must follow. It is called before the model is searched, so
        that a caller without the right to a model cannot find out that the model exists.
        """
        if self.engine.admission is None:
            return None
        caller = call.caller.for_another_operation()
        caller.body_bytes = call.caller.body_bytes
        await self.engine.admit(caller, Operation.INFER, model)
        return caller


def refusal(error: HeadraceError, usual: HttpReply, request: HttpRequest) -> HttpReply:
    """Return ``usual``, the answer to ``request`` in Triton's form, in OpenAI's form, with an id."""
    reply = as_openai(error, usual, f"{request.method} {request.path}")
    return reply._replace(headers=[*reply.headers, id_header(request_id(request))])


async def read_body(call: HttpCall) -> dict[str, Any]:
    """Return the JSON object in the body. Raises `InvalidArgument`."""
    if call.request.headers.get(b"content-encoding", b"identity") != b"identity":
        raise InvalidArgument("the header Content-Encoding must be 'identity'")
    try:
        document = await call.read_json(has_texts=True)
    except CallerError as error:
        raise InvalidArgument(error.message) from None  # Triton's status for it is 500
    if type(document) is not dict:
        raise InvalidArgument("the body must be a JSON object")
    return document


async def off_loop(engine: Engine, is_small: bool, work: Callable[[], T]) -> T:
    """Return what ``work`` does, on a thread unless ``is_small``: 10 MB would block the event loop for 20 ms."""
    return work() if is_small else await engine.off_loop_work.run(work)


def model_name(document: dict[str, Any]) -> str:
    """Return the member ``model``. Raises `BadMember`."""
    name = document.get("model")
    if type(name) is not str or not name:
        raise BadMember("model", "model must be the name of a model")
    if len(name) > _LONGEST_NAME:
        raise BadMember("model", f"model has {len(name)} characters, the limit is {_LONGEST_NAME}")
    return name


def request_id(request: HttpRequest) -> str:
    """Return the id that the caller gives the request in ``X-Request-Id``, or else a new one."""
    given = request.headers.get(_REQUEST_ID, b"")
    if 0 < len(given) <= _LONGEST_ID and given.isascii() and (text := given.decode()).isprintable():
        return text
    return f"req_{uuid4().hex}"


def id_header(request_id: str) -> tuple[bytes, bytes]:
    return b"X-Request-Id", request_id.encode()


def json_answer(body: bytes, request_id: str) -> HttpReply:
    """Return ``body``, which is JSON, as the answer to the request ``request_id``."""
    return HttpReply(200, [_JSON, id_header(request_id)], [body])
