"""The table of paths and handlers, from the routes of extensions.

Every route names its operation. The interceptors of the server admit it before a handler gets the request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from headrace.engine import Operation
from headrace.errors import HeadraceError, InternalError, NotFound
from headrace.frontends.cleared_cache import ClearedCache
from headrace.frontends.failures import is_verbose, log_fault
from headrace.telemetry.log_limits import rate_limited_logger
from headrace_http.absent_routes import absent_routes
from headrace_http.admitted_requests import AdmittedReply, caller_of
from headrace_http.caller_limits import HttpLimits, port_limits
from headrace_http.message import Cancel, HttpRequest, Reply, error_reply, text_error
from headrace_http.plugin_routes import METHODS, HttpRoute, read_route
from headrace_http.request_log import Dispatch, watched
from headrace_http.route_handlers import Handler, RouteHandlers
from headrace_http.url_paths import PathTarget, template
from headrace_http.web_sockets import SocketHandler

if TYPE_CHECKING:
    from headrace.engine import AnyOperation, Engine

log = rate_limited_logger(__name__)

#: The paths of these name a region, not a model.
_OF_REGIONS = (Operation.SHARED_MEMORY_STATUS, Operation.SHARED_MEMORY_REGISTER, Operation.SHARED_MEMORY_UNREGISTER)
#: At most this many paths are remembered, because clients choose them.
_REMEMBERED = 1024
_TRACE_CONTEXT = b"traceparent"
_EVERY_PATH = re.compile(".*", re.DOTALL)


class Route(NamedTuple):
    """``pattern`` must match the whole path; ``handlers`` are by method.

    ``operation`` is admitted before the method is checked, unless ``operations`` has another one for the method.
    """

    pattern: re.Pattern[str]
    operation: AnyOperation
    handlers: dict[str, Handler]
    operations: dict[str, AnyOperation]


class Routes:
    """Answers requests of all hosts. One per frontend."""

    def __init__(
        self,
        engine: Engine,
        routes: Iterable[HttpRoute] | None = None,
        otherwise: HttpRoute | None = None,
        transport: str = "http",
        limits: HttpLimits | None = None,
        has_sockets: bool = False,
    ) -> None:
        """Create the table of ``routes``. By default, these are the routes of all extensions, and what Triton's
        extensions have that are not installed.

        ``otherwise`` answers every other path, by any method. ``transport`` is that of the callers, and ``limits`` are
        those of the port. Without ``has_sockets``, WebSocket routes are refused.
        """
        self._admission = admission = engine.admission
        self._sampler = None if admission is None else admission.sampler
        self._follows_context = admission is not None and admission.follows_trace_context
        self._transport = transport
        self._found = ClearedCache[str, tuple[Route, PathTarget]](_REMEMBERED)
        self._handlers = RouteHandlers(
            engine,
            self._log_error,
            self._fail,
            transport,
            port_limits(engine.options) if limits is None else limits,
            has_sockets,
        )
        self.table = self._build(engine.additions(HttpRoute) if routes is None else routes)
        if routes is None:
            absent = absent_routes()
            self.table += [Route(template(route.path).pattern, route.operation, route.handlers, {}) for route in absent]
        if otherwise is not None:
            handlers = dict.fromkeys(METHODS, otherwise.handler(self._handlers))
            self.table.append(Route(_EVERY_PATH, otherwise.operation, handlers, {}))
        #: Answers a request through its ``reply``, once, now or later. Never raises. Returns a function to call if the
        #: caller disconnects first, or None. Replaced when the log becomes verbose, and when it no longer is.
        self.dispatch: Dispatch
        #: Called with each `dispatch` that replaces another.
        self.on_dispatch: list[Callable[[Dispatch], None]] = []
        self._choose_dispatch()
        if engine.log is not None:
            engine.log.on_change.append(self._choose_dispatch)

    def _choose_dispatch(self) -> None:
        if self._sampler is not None:
            self._unadmitted = self._handlers.inference.without_admission()
        dispatch = self._dispatch if self._admission is None else self._dispatch_admitted
        self.dispatch = watched(dispatch, self._target) if is_verbose() else dispatch
        for use in self.on_dispatch:
            use(self.dispatch)

    def socket_limit(self, path: str) -> int:
        """Return how many bytes a message to the WebSocket of ``path`` may have; 0 if the path has none."""
        try:
            handler = self._find(path)[0].handlers.get("GET")
        except NotFound:
            return 0
        return handler.max_message_bytes if isinstance(handler, SocketHandler) else 0

    def _dispatch(self, request: HttpRequest, reply: Reply) -> Cancel | None:
        try:
            route, target = self._found.get(request.path) or self._find(request.path)
            handler = route.handlers.get(request.method)
            if handler is None:
                reply(text_error(405, "Method Not Allowed"))
                return None
            return handler(request, target, reply)
        except Exception as error:
            self._fail(request, reply, error)
        return None

    def _dispatch_admitted(self, request: HttpRequest, reply: Reply) -> Cancel | None:
        """`_dispatch` for a server with interceptors. An unknown path is not an operation."""
        try:
            route, target = self._found.get(request.path) or self._find(request.path)
        except NotFound as error:
            self._fail(request, reply, error)
            return None
        sampler = self._sampler
        if sampler is not None and route.handlers.get(request.method) is self._handlers.inference:
            sent = request.headers.get(_TRACE_CONTEXT) if self._follows_context else None
            if sampler.spared and sent is None:
                sampler.spared -= 1
                return self._infer_unadmitted(request, target, reply)
            if not sampler.samples(Operation.INFER, lambda: target.name, (sent or b"").decode("latin-1")):
                return self._infer_unadmitted(request, target, reply)
        admitted = AdmittedReply(reply, caller_of(request, reply, self._transport))
        return admitted.begin(
            self._admission,  # type: ignore[arg-type]  # there is one
            route.operations.get(request.method, route.operation),
            "" if route.operation in _OF_REGIONS else target.name,
            partial(self._answer, route, target, request, admitted),
            partial(self._fail, request, admitted),
        )

    def _infer_unadmitted(self, request: HttpRequest, target: PathTarget, reply: Reply) -> Cancel | None:
        """Answer an inference that all interceptors leave out."""
        try:
            return self._unadmitted(request, target, reply)
        except Exception as error:
            self._fail(request, reply, error)
            return None

    def _answer(self, route: Route, target: PathTarget, request: HttpRequest, reply: Reply) -> Cancel | None:
        try:
            handler = route.handlers.get(request.method)
            if handler is not None:
                return handler(request, target, reply)
            reply(text_error(405, "Method Not Allowed"))
        except Exception as error:
            self._fail(request, reply, error)
        return None

    def _fail(self, request: HttpRequest, reply: Reply, error: Exception) -> None:
        """Answer ``error``."""
        if not isinstance(error, HeadraceError):
            log.error("a request to %r failed", request.path[:1000], exc_info=error)
            error = InternalError("the request failed inside the server; its log has the reason")
        else:
            self._log_error(error, request)
        reply(error_reply(error))

    def _log_error(self, error: HeadraceError, request: HttpRequest) -> None:
        """Log ``error`` if it is the server's fault."""
        target = self._target(request.path) or PathTarget()
        what = "Infer" if request.path.endswith("/infer") else f"{request.method} {request.path}"
        log_fault(error, what, target.name, target.version)

    def _target(self, path: str) -> PathTarget | None:
        """Return what ``path`` names; None for an unknown path."""
        try:
            return self._find(path)[1]
        except NotFound:
            return None

    def _find(self, path: str) -> tuple[Route, PathTarget]:
        for route in self.table:
            match = route.pattern.fullmatch(path)
            if match is not None:
                found = route, _target_of(match.groupdict(""))
                if len(path) < 256:
                    self._found.keep(path, found)
                return found
        raise NotFound("Not Found")

    def _build(self, routes: Iterable[HttpRoute]) -> list[Route]:
        """Return the routes in the order in which they are tried, one for each path."""
        found: dict[str, Route] = {}
        for part in routes:
            method, path = read_route(type(part))
            route = found.setdefault(path.text, Route(path.pattern, part.operation, {}, {}))
            route.handlers[method] = part.handler(self._handlers)
            route.operations[method] = part.operation
        return list(found.values())


def _target_of(values: dict[str, str]) -> PathTarget:
    return PathTarget(values.get("name", ""), values.get("version", ""), values.get("repository", ""), values)
