"""The verbose log of HTTP requests: that each arrived, and why it failed. Used only if the log is verbose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from headrace.errors import CallerError
from headrace.frontends import failures
from headrace.messages.ticket import Ticket
from headrace_http.message import (
    HEADER_LENGTH,
    Cancel,
    ErrorReply,
    HttpReply,
    HttpRequest,
    Reply,
    ReplyStream,
    reply_stream,
)

if TYPE_CHECKING:
    from headrace_http.url_paths import PathTarget

Dispatch: TypeAlias = Callable[[HttpRequest, Reply], "Cancel | None"]

#: The numbers of Triton's HTTP library, which are in its log.
_METHODS = {"GET": 0, "HEAD": 1, "POST": 2, "PUT": 3, "DELETE": 4}
#: The id of a request is searched in at most this many bytes of a body.
_BODY_BYTES = 64 * 1024


def watched(dispatch: Dispatch, target: Callable[[str], PathTarget | None]) -> Dispatch:
    """Return ``dispatch`` with logging of every request. ``target`` returns what a path names."""

    def watch(request: HttpRequest, reply: Reply) -> Cancel | None:
        failures.log.debug("HTTP request: %d %s", _METHODS.get(request.method, 5), request.path[:1000])
        watcher = _Watcher(request, reply, target)
        cancel = dispatch(request, watcher)
        watcher.cancel = cancel
        return cancel

    return watch


class _Watcher:
    """Passes the reply on, and logs it if it is an error."""

    __slots__ = ("_reply", "_request", "_target", "cancel")

    def __init__(self, request: HttpRequest, reply: Reply, target: Callable[[str], PathTarget | None]) -> None:
        self.cancel: Cancel | None = None
        self._request = request
        self._reply = reply
        self._target = target

    @property
    def peer(self) -> str:
        """The address of the other end; empty if unknown."""
        found: str = getattr(self._reply, "peer", "")
        return found

    @property
    def certificate(self) -> Any:
        """The verified certificate of the other end, or None."""
        return getattr(self._reply, "certificate", None)

    @property
    def socket(self) -> Any:
        """The WebSocket that the request opens; None if it opens none."""
        return getattr(self._reply, "socket", None)

    def stream(self, head: HttpReply) -> ReplyStream:
        return reply_stream(self._reply, head)

    def __call__(self, reply: HttpReply) -> None:
        if reply.status >= 400 and reply.parts:  # "not ready" has no body, and is not a failure
            self._log_error(reply)
        self.cancel = None  # it refers to this object
        self._reply(reply)

    def _log_error(self, reply: HttpReply) -> None:
        request = self._request
        target = self._target(request.path)
        model, version = ("", "") if target is None else (target.name, target.version)
        what = "Infer" if request.path.endswith("/infer") else f"{request.method} {request.path}"
        failures.log_failure(_failure_of(reply), what, model, version, self._request_id() if what == "Infer" else "")

    def _request_id(self) -> str:
        """Return the id of the submitted request, or from the body of one that was not submitted."""
        submitted = getattr(self.cancel, "__self__", None)
        if isinstance(submitted, Ticket):
            return submitted.request.id
        request = self._request
        length = request.headers.get(HEADER_LENGTH, b"%d" % len(request.body))
        if not (length.isdigit() and len(length) < 9 and int(length) <= _BODY_BYTES):
            return ""
        try:
            found = orjson.loads(request.body[: int(length)])
        except orjson.JSONDecodeError:
            return ""
        given = found.get("id", "") if isinstance(found, dict) else ""
        return given if isinstance(given, str) else ""


def _failure_of(reply: HttpReply) -> failures.Failure:
    if isinstance(reply, ErrorReply):
        return reply.failure
    try:
        text = str(orjson.loads(reply.parts[0])["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):  # a route's own form
        text = f"status {reply.status}"
    return failures.Failure.of(CallerError(text))
