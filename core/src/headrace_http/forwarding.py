"""A port whose paths stand for those of other ports, as clouds want them: ``/invocations`` for ``.../infer``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import Code, HeadraceError
from headrace_http.caller_limits import HttpLimits
from headrace_http.http_host import HttpPort
from headrace_http.message import (
    Cancel,
    ErrorReply,
    HttpReply,
    HttpRequest,
    Reply,
    ReplyStream,
    error_reply,
    reply_stream,
)
from headrace_http.metrics_frontend import METRICS_PATH, MetricsFrontend
from headrace_http.request_log import Dispatch
from headrace_http.routes import Routes

if TYPE_CHECKING:
    from headrace.engine import Engine

_REFUSALS = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)


class Forwarded(NamedTuple):
    """The request that answers another one: ``request``, on the port of KServe v2, or ``GET /metrics``.

    ``change`` returns the answer for the caller, such as one with other headers. A streamed answer passes it without
    its body, once.

    ``otherwise`` stands for the same request if its caller may not do what ``request`` asks. So a port that chooses
    between two models does not tell a model that is absent from one that the caller may not use.
    """

    request: HttpRequest
    change: Callable[[HttpReply], HttpReply] = lambda reply: reply
    otherwise: Forwarded | None = None


class ForwardingPort(HttpPort):
    """A port that answers its paths by those of KServe v2: `forward` says by which.

    Interceptors admit the operation of the path that answers, for a caller over ``http``: what the flags restrict on
    the first port is restricted here, too. The limit of a body is that path's.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._metrics = MetricsFrontend(engine)

    @abstractmethod
    def forward(self, request: HttpRequest) -> Forwarded | HttpReply | None:
        """Return what answers ``request``: another request, an answer, or None for the `routes` of this port.

        Called for each request, and before that with an empty body. Raises `HeadraceError`, which is the answer.
        """

    async def start(self) -> None:
        if self._metrics.enabled:
            await self._metrics.prepare()
        await super().start()

    @property
    def transport(self) -> str:
        return "http"  # the paths behind it are those of the first port, and so are its rules

    def limits(self) -> HttpLimits:
        common = super().limits()
        return ForwardedLimits(**{field.name: getattr(common, field.name) for field in fields(common)}, port=self)

    def answering(self, has_sockets: bool) -> Routes:
        own = super().answering(has_sockets)
        first = Routes(self.engine, transport=self.transport, limits=self.limits())
        metrics = self._metrics.answering(has_sockets) if self._metrics.enabled else first
        own.dispatch = _Forwarding(self, own.dispatch, first.dispatch, metrics.dispatch)
        return own


@dataclass(frozen=True, slots=True)
class ForwardedLimits(HttpLimits):
    """The limits of a `ForwardingPort`: that of a body is the limit of the path that answers."""

    port: ForwardingPort | None = None

    def body_limit(self, path: str, headers: Mapping[bytes, bytes]) -> int:
        path, headers = self._forwarded(path, headers)
        return HttpLimits.body_limit(self, path, headers)

    def body_refusal(self, size_bytes: int, path: str, headers: Mapping[bytes, bytes]) -> Any:
        path, headers = self._forwarded(path, headers)
        return HttpLimits.body_refusal(self, size_bytes, path, headers)

    def _forwarded(self, path: str, headers: Mapping[bytes, bytes]) -> tuple[str, Mapping[bytes, bytes]]:
        assert self.port is not None
        try:
            found = self.port.forward(HttpRequest("POST", path, headers, memoryview(b"")))
        except HeadraceError:
            return path, headers
        return (found.request.path, found.request.headers) if isinstance(found, Forwarded) else (path, headers)


class _Forwarding:
    """Answers each request by the routes that `ForwardingPort.forward` chooses."""

    def __init__(self, port: ForwardingPort, own: Dispatch, first: Dispatch, metrics: Dispatch) -> None:
        self._forward, self._own, self._first, self._metrics = port.forward, own, first, metrics

    def __call__(self, request: HttpRequest, reply: Reply) -> Cancel | None:
        try:
            found = self._forward(request)
        except HeadraceError as error:
            found = error_reply(error)
        if found is None:
            return self._own(request, reply)
        if isinstance(found, HttpReply):
            reply(found)
            return None
        return self._answer(found, reply)

    def _answer(self, found: Forwarded, reply: Reply) -> Cancel | None:
        answer = self._metrics if found.request.path == METRICS_PATH else self._first
        changed = _ChangedReply(reply, found.change)
        if found.otherwise is None:
            return answer(found.request, changed)
        either = _EitherReply(changed, partial(self._answer, found.otherwise, reply))
        return either.begun(answer(found.request, either))


class _ChangedReply:
    """Takes an answer for ``reply``, and changes it."""

    __slots__ = ("_change", "_reply")

    def __init__(self, reply: Reply, change: Callable[[HttpReply], HttpReply]) -> None:
        self._reply, self._change = reply, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reply, name)  # the peer and its certificate

    def __call__(self, reply: HttpReply) -> None:
        self._reply(self._change(reply))

    def stream(self, head: HttpReply) -> ReplyStream:
        return reply_stream(self._reply, self._change(head))


class _EitherReply:
    """Takes an answer for ``reply``. If it refuses the caller, ``otherwise`` answers instead."""

    __slots__ = ("_cancel", "_otherwise", "_reply")

    def __init__(self, reply: _ChangedReply, otherwise: Callable[[], Cancel | None]) -> None:
        self._reply = reply
        self._otherwise: Callable[[], Cancel | None] | None = otherwise
        self._cancel: Cancel | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reply, name)

    def begun(self, cancel: Cancel | None) -> Cancel:
        """Note that ``cancel`` cancels the first request. Return a function that cancels the one in progress."""
        if self._otherwise is not None:
            self._cancel = cancel
        return self._leave

    def _leave(self) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    def __call__(self, reply: HttpReply) -> None:
        otherwise, self._otherwise = self._otherwise, None
        if otherwise is not None and isinstance(reply, ErrorReply) and reply.failure.code in _REFUSALS:
            self._cancel = otherwise()
        else:
            self._cancel = None
            self._reply(reply)
