"""Errors in OpenAI's form: ``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``."""

from __future__ import annotations

from typing import Any

import orjson

from headrace import CallerError, Code, HeadraceError, HttpReply, InvalidArgument, one_line
from headrace_openai.event_lines import event_line

_INVALID = "invalid_request_error"
#: The error of a path that no route has.
_NO_PATH = "Not Found"
_MOST_SHOWN = 200
#: The members ``type`` and ``code`` for each `Code`, as OpenAI's service has them.
_KINDS: dict[Code, tuple[str, str | None]] = {
    Code.UNAUTHENTICATED: (_INVALID, "invalid_api_key"),
    Code.PERMISSION_DENIED: (_INVALID, "permission_denied"),
    Code.NOT_FOUND: (_INVALID, "model_not_found"),
    Code.RESOURCE_EXHAUSTED: ("rate_limit_error", "rate_limit_exceeded"),
    Code.UNAVAILABLE: ("server_error", "service_unavailable"),
    Code.INTERNAL: ("server_error", None),
}


class BadMember(InvalidArgument):
    """A member of the body breaks a rule. ``param`` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def error_line(error: HeadraceError, message: str) -> bytes:
    """Return ``error`` as one line of JSON. ``message`` is its text for callers."""
    return event_line({"error": _members(error, message)})


def as_openai(error: HeadraceError, usual: HttpReply, asked: str) -> HttpReply:
    """Return ``usual``, the answer in Triton's form to the method and path ``asked``, in OpenAI's form.

    A fault of the caller is 4xx: clients of OpenAI send a request again that is answered with 5xx.
    """
    status = 400 if usual.status >= 500 and isinstance(error, CallerError) else usual.status
    message = message_in(b"".join(usual.parts))
    if usual.status == 404 and message == _NO_PATH:
        error, message = InvalidArgument(_NO_PATH), f"Invalid URL ({one_line(asked)[:_MOST_SHOWN]})"
    elif status == 413:
        message += " (--openai-max-body-bytes)"
    return usual._replace(status=status, parts=[error_line(error, message)])


def message_in(line: bytes) -> str:
    """Return the text of an error in Triton's form."""
    return str(orjson.loads(line)["error"])


def _members(error: HeadraceError, message: str) -> dict[str, Any]:
    is_callers = isinstance(error, CallerError)
    kind, code = _KINDS.get(error.code, (_INVALID if is_callers else "server_error", None))
    if is_callers and error.code is Code.INTERNAL:
        kind = _INVALID
    param = error.param if isinstance(error, BadMember) else "model" if error.code is Code.NOT_FOUND else None
    return {"message": message, "type": kind, "param": param, "code": code}
