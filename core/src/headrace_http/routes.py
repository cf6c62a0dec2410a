"""The table of paths and handlers, from the routes of extensions.

Every route names its operation. The interceptors of the server admit it before a handler gets the request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from headrace.engine import Operation
from headrace.errors import HeadraceError, InternalError, NotFound, Unsupported
from headrace.frontends.failures import Failure, is_verbose, log_fault
from headrace.telemetry.log_limits import rate_limited_logger
from headrace_hosts.cleared_cache import ClearedCache
from headrace_hosts.held_memory import no_memory
from headrace_http.absent_routes import absent_routes
from headrace_http.admitted_requests import AdmittedReply, caller_of
from headrace_http.caller_limits import HttpLimits, port_limits
from headrace_http.inference import InferenceHandler
from headrace_http.message import Cancel, ErrorReply, HttpReply, HttpRequest, Reply, error_reply, text_error
from headrace_http.plugin_routes import METHODS, HttpRoute, read_route, refuse
from headrace_http.request_head import Refused
from headrace_http.request_log import Dispatch, watched
from headrace_http.route_handlers import Handler, RouteHandlers
from headrace_http.url_paths import PathTarget, template
from headrace_http.web_sockets import SocketHandler

if TYPE_CHECKING:
    from headrace.engine import AnyOperation, Engine, InterceptorChain

log = rate_limited_logger(__name__)

#: The paths of these name a region, not a model.
_OF_REGIONS = (Operation.SHARED_MEMORY_STATUS, Operation.SHARED_MEMORY_REGISTER, Operation.SHARED_MEMORY_UNREGISTER)
#: At most this many paths are remembered, because clients choose them.
_REMEMBERED = 1024
_TRACE_CONTEXT = b"traceparent"
_EVERY_PATH = re.compile(".*", re.DOTALL)
#: Words an error that no route words, as `HttpRoute.refusal` does.
Refusal: TypeAlias = Callable[[HeadraceError, HttpReply, HttpRequest], HttpReply]


class Route(NamedTuple):
    """``pattern`` must match the whole path; ``handlers`` are by method.

    ``entries`` are the handlers behind admission. ``otherwise`` refuses the other methods, after the admission of
    ``operation``. ``parts`` word their errors; the first one those of other methods.
    """

    pattern: re.Pattern[str]
    operation: AnyOperation
    handlers: dict[str, Handler]
    entries: dict[str, Handler]
    otherwise: Handler
    parts: dict[str, HttpRoute]


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
        refusal: Refusal = lambda error, usual, request: usual,
    ) -> None:
        """Create the table of ``routes``. By default, these are the routes of all extensions, and what Triton's
        extensions have that are not installed.

        ``otherwise`` answers every other path, by any method. ``transport`` is that of the callers, and ``limits`` are
        those of the port. Without ``has_sockets``, WebSocket routes are refused. ``refusal`` words errors of paths
        that are no route's.
        """
        self._admission = engine.admission
        self._transport = transport
        self._found = ClearedCache[str, tuple[Route, PathTarget]](_REMEMBERED)
        self._refusal = refusal
        #: By `HttpRoute.refusal_prefix`, the longest first.
        self._forms: dict[str, HttpRoute] = {}
        #: The limits of the port, with those of routes.
        self.limits = replace(port_limits(engine.options) if limits is None else limits, of_route=self._body_limit)
        self._handlers = RouteHandlers(
            engine,
            self._log_error,
            self._fail,
            transport,
            self.limits,
            has_sockets,
        )
        self.table = self._build(engine.additions(HttpRoute) if routes is None else routes)
        if routes is None:
            absent = absent_routes()
            self.table += [
                self._route(template(each.path).pattern, each.operation, each.handlers, {}) for each in absent
            ]
        if otherwise is not None:
            handlers = dict.fromkeys(METHODS, otherwise.handler(self._handlers))
            self.table.append(self._route(_EVERY_PATH, otherwise.operation, handlers, {"": otherwise}))
        #: Answers a request through its ``reply``, once, now or later. Never raises. Returns a function to call if the
        #: caller disconnects first, or None. Replaced when the log becomes verbose, and when it no longer is.
        self.dispatch: Dispatch
        #: Called with each `dispatch` that replaces another.
        self.on_dispatch: list[Callable[[Dispatch], None]] = []
        self._choose_dispatch()
        if engine.log is not None:
            engine.log.on_change.append(self._choose_dispatch)

    def _choose_dispatch(self) -> None:
        self.dispatch = watched(self._dispatch, self._target) if is_verbose() else self._dispatch
        for use in self.on_dispatch:
            use(self.dispatch)

    def socket_limit(self, path: str) -> int:
        """Return how many bytes a message to the WebSocket of ``path`` may have; 0 if the path has none."""
        try:
            handler = self._find(path)[0].handlers.get("GET")
        except NotFound:
            return 0
        return handler.max_message_bytes if isinstance(handler, SocketHandler) else 0

    def refusal(self, refused: Refused, request: HttpRequest) -> HttpReply:
        """Return the answer to ``request``, which its host refuses, in the form of the errors at its path."""
        return self._worded(refused.error, refused.reply, request)

    def _worded(self, error: HeadraceError, usual: HttpReply, request: HttpRequest) -> HttpReply:
        """Return the answer to ``request``, which fails by ``error``. ``usual`` is that in Triton's form."""
        part = self._part(request)
        if part is None:
            return ErrorReply(*self._refusal(error, usual, request)).of(Failure.of(error))
        return usual if type(part).refusal is HttpRoute.refusal else refuse(part, error, request, usual)

    def _part(self, request: HttpRequest) -> HttpRoute | None:
        """Return the route that words the errors of ``request``; None if there is none."""
        try:
            parts = self._find(request.path)[0].parts
        except NotFound:
            return next((part for prefix, part in self._forms.items() if request.path.startswith(prefix)), None)
        return parts.get(request.method) or next(iter(parts.values()), None)

    def _body_limit(self, path: str) -> int | None:
        """Return the largest body that a route at ``path`` takes; None if that is the port's own limit."""
        try:
            parts = self._find(path)[0].parts
        except NotFound:
            return None
        return max((part.max_body_bytes or 0 for part in parts.values()), default=0) or None

    def _dispatch(self, request: HttpRequest, reply: Reply) -> Cancel | None:
        try:
            route, target = self._found.get(request.path) or self._find(request.path)
            handler = route.entries.get(request.method) or route.otherwise
            return handler(request, target, reply)
        except Exception as error:
            self._fail(request, reply, error)
        return None

    def _admitted(self, operation: AnyOperation, handler: Handler) -> Handler:
        """Return ``handler`` behind the interceptors of the server, if there are any."""
        admission = self._admission
        if admission is None:
            return handler
        has_model = operation not in _OF_REGIONS

        def admit(chain: InterceptorChain, request: HttpRequest, target: PathTarget, reply: Reply) -> Cancel | None:
            admitted = AdmittedReply(reply, caller_of(request, reply, self._transport))
            try:
                waiting = chain.admit(admitted.caller, operation, target.name if has_model else "")
                if waiting is None:
                    return admitted.begun(handler(request, target, admitted))
            except Exception as error:
                self._fail(request, admitted, error)
                return None
            answer = partial(self._answer, handler, request, target, admitted)
            return admitted.wait(waiting, answer, partial(self._fail, request, admitted))

        if not isinstance(handler, InferenceHandler):
            return partial(admit, admission)
        return admission.select(
            admit,
            handler.without_admission(),
            partial(handler.recorded, self._transport),
            _trace_context,
            _model_name,
            partial(handler.permitted, self._transport),
        )

    def _answer(self, handler: Handler, request: HttpRequest, target: PathTarget, reply: Reply) -> Cancel | None:
        try:
            return handler(request, target, reply)
        except Exception as error:
            self._fail(request, reply, error)
        return None

    def _fail(self, request: HttpRequest, reply: Reply, error: Exception) -> None:
        """Answer ``error``."""
        if isinstance(error, MemoryError):
            error = no_memory("the server has no memory for the request")
        elif not isinstance(error, HeadraceError):
            log.error("a request to %r failed", request.path[:1000], exc_info=error)
            error = InternalError("the request failed inside the server; its log has the reason")
        else:
            self._log_error(error, request)
        reply(self._worded(error, error_reply(error), request))

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
            route = found.get(path.text)
            if route is None:
                route = found[path.text] = self._route(path.pattern, part.operation, {}, {})
            route.parts[method] = part
            route.handlers[method] = handler = part.handler(self._handlers)
            route.entries[method] = self._admitted(part.operation, handler)
            if part.refusal_prefix:
                self._forms.setdefault(part.refusal_prefix, part)
        self._forms = dict(sorted(self._forms.items(), key=lambda form: -len(form[0])))
        return list(found.values())

    def _route(
        self,
        pattern: re.Pattern[str],
        operation: AnyOperation,
        handlers: Mapping[str, Handler],
        parts: dict[str, HttpRoute],
    ) -> Route:
        entries = {method: self._admitted(operation, handler) for method, handler in handlers.items()}
        otherwise = self._admitted(operation, self._refuse_method)
        return Route(pattern, operation, dict(handlers), entries, otherwise, parts)

    def _refuse_method(self, request: HttpRequest, target: PathTarget, reply: Reply) -> None:
        error = Unsupported("Method Not Allowed")
        reply(self._worded(error, text_error(405, error.message), request))


def _trace_context(request: HttpRequest, target: PathTarget) -> str:
    """Return the header that says which trace the request belongs to."""
    return request.headers.get(_TRACE_CONTEXT, b"").decode("latin-1")


def _model_name(request: HttpRequest, target: PathTarget) -> str:
    return target.name


def _target_of(values: dict[str, str]) -> PathTarget:
    return PathTarget(values.get("name", ""), values.get("version", ""), values.get("repository", ""), values)
