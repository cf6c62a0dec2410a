"""Which handler answers which path: one table (docs/spec/behaviours.md sections 1.1 and 1.2).

Every route names its operation, which the interceptors of the server admit before a handler sees the request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from headrace.engine import Operation
from headrace.errors import HeadraceError, InternalError, NotFound, Unsupported
from headrace.frontends.failures import is_verbose, tell_fault
from headrace.frontends.recognition import Recent
from headrace.frontends.shared_memory import Kind, refuse_change, require_status
from headrace.telemetry.pacing import paced
from headrace_http import url_paths as paths
from headrace_http.admitted_requests import AdmittedReply, caller_of
from headrace_http.handlers import DescriptionHandlers, RepositoryHandlers
from headrace_http.inference import InferenceHandler
from headrace_http.message import Cancel, HttpReply, HttpRequest, Reply, error_reply, json_reply, text_error
from headrace_http.plugin_routes import RouteHandler, read_route
from headrace_http.request_log import Dispatch, watched
from headrace_http.url_paths import PathTarget

if TYPE_CHECKING:
    from headrace.engine import AnyOperation, Engine

log = paced(__name__)

Handler: TypeAlias = Callable[[HttpRequest, PathTarget, Reply], "Cancel | None"]
Answer: TypeAlias = Callable[[HttpRequest, PathTarget], HttpReply]

#: Their paths name a region, and no model.
_OF_REGIONS = (Operation.SHARED_MEMORY_STATUS, Operation.SHARED_MEMORY_REGISTER, Operation.SHARED_MEMORY_UNREGISTER)
#: Paths whose route is remembered; a bound, because clients choose the paths.
_REMEMBERED = 1024


class Route(NamedTuple):
    """``pattern`` must match the whole path; ``handlers`` are by method. ``operation`` is admitted before the method is
    looked at, unless ``operations`` has another one for the method."""

    pattern: re.Pattern[str]
    operation: AnyOperation
    handlers: dict[str, Handler]
    operations: dict[str, AnyOperation]


class Routes:
    """Answers requests, whatever host they came through. One per frontend."""

    def __init__(self, engine: Engine) -> None:
        self._admission = engine.admission
        self._found = Recent[str, tuple[Route, PathTarget]](_REMEMBERED)
        self._tasks: set[asyncio.Task[None]] = set()
        self.table = self._build(engine)
        dispatch = self._dispatch if self._admission is None else self._dispatch_admitted
        #: Answers a request through its ``reply``, once, now or later. Never raises. Returns what to call if
        #: the caller goes away first, or None where nothing can be cancelled.
        self.dispatch: Dispatch = watched(dispatch, self._target) if is_verbose() else dispatch

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
        """`_dispatch` for a server with interceptors. A path that nothing answers is no operation."""
        try:
            route, target = self._found.get(request.path) or self._find(request.path)
        except NotFound as error:
            self._fail(request, reply, error)
            return None
        admitted = AdmittedReply(reply, caller_of(request, reply))
        return admitted.begin(
            self._admission,  # type: ignore[arg-type]  # there is one
            route.operations.get(request.method, route.operation),
            "" if route.operation in _OF_REGIONS else target.name,
            partial(self._answer, route, target, request, admitted),
            partial(self._fail, request, admitted),
        )

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
            self._tell(error, request)
        reply(error_reply(error))

    def _tell(self, error: HeadraceError, request: HttpRequest) -> None:
        """Log ``error`` if it is the server's fault."""
        target = self._target(request.path) or PathTarget()
        what = "Infer" if request.path.endswith("/infer") else f"{request.method} {request.path}"
        tell_fault(error, what, target.name, target.version)

    def _target(self, path: str) -> PathTarget | None:
        """What ``path`` names, if it is one of ours."""
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

    def _build(self, engine: Engine) -> list[Route]:
        """In the order in which Triton tries them, and behind them what plugins add."""
        about, repository, inference = DescriptionHandlers(engine), RepositoryHandlers(engine), InferenceHandler(engine)
        shm: tuple[Kind, ...] = ("system", "cuda")
        log_settings = _later("log settings")
        return [
            make_route(paths.ALL_STATISTICS, Operation.STATISTICS, GET=_direct(about.statistics)),
            make_route(paths.LOGGING, Operation.LOG_SETTINGS, GET=log_settings, POST=log_settings),
            make_route(paths.INFER, Operation.INFER, POST=inference),
            make_route(paths.GENERATE, Operation.GENERATE, POST=_later("the generate extension")),
            make_route(paths.MODEL_READY, Operation.MODEL_READY, GET=self._perhaps_task(about.model_ready)),
            make_route(paths.CONFIG, Operation.MODEL_CONFIG, GET=_direct(about.config)),
            make_route(paths.STATISTICS, Operation.STATISTICS, GET=_direct(about.statistics)),
            make_route(paths.MODEL, Operation.MODEL_METADATA, GET=_direct(about.model)),
            make_route(paths.TRACE, Operation.TRACE_SETTINGS, GET=_later("tracing"), POST=_later("tracing")),
            make_route(paths.SERVER, Operation.SERVER_METADATA, GET=_direct(about.server)),
            make_route(paths.LIVE, Operation.LIVE, GET=_direct(about.live)),
            make_route(paths.READY, Operation.READY, GET=self._perhaps_task(about.ready)),
            *[route for kind, region in zip(shm, paths.REGIONS, strict=True) for route in _shared_memory(kind, region)],
            make_route(paths.INDEX, Operation.INDEX, POST=self._task(repository.index)),
            make_route(paths.LOAD, Operation.LOAD, POST=self._load(repository)),
            make_route(paths.UNLOAD, Operation.UNLOAD, POST=self._task(repository.unload)),
            make_route(paths.EXPLAIN, Operation.EXPLAIN, GET=_direct(about.explain)),
            *self._added(engine, inference),
        ]

    def _added(self, engine: Engine, inference: InferenceHandler) -> list[Route]:
        """Those of plugins; raises `LoadError` where two of them would answer one path."""
        found: dict[str, Route] = {}
        for part in engine.routes:
            method, path = read_route(part)
            route = found.setdefault(path.text, Route(path.pattern, part.operation, {}, {}))
            route.handlers[method] = RouteHandler(part(engine), inference, self._tell)
            route.operations[method] = part.operation
        return list(found.values())

    def _load(self, repository: RepositoryHandlers) -> Handler:
        """The handler of loads, which looks at who sent them."""

        def handle(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
            self._task(partial(repository.load, peer=getattr(reply, "peer", "")))(request, target, reply)

        return handle

    def _perhaps_task(self, answer: Callable[[HttpRequest, PathTarget], HttpReply | Awaitable[HttpReply]]) -> Handler:
        """A handler that has the reply at once, or else awaits it as `_task` does."""

        def handle(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
            found = answer(request, target)
            if isinstance(found, HttpReply):
                reply(found)
                return

            async def wait(request: HttpRequest, target: PathTarget) -> HttpReply:
                return await found

            self._task(wait)(request, target, reply)

        return handle

    def _task(self, coroutine: Callable[[HttpRequest, PathTarget], Awaitable[HttpReply]]) -> Handler:
        """A handler that runs ``coroutine`` to its end, even if the caller goes away."""

        async def run(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
            try:
                reply(await coroutine(request, target))
            except HeadraceError as error:
                # Without its frames, which hold the request for as long as anybody holds the error.
                self._fail(request, reply, error.with_traceback(None))
            except Exception as error:
                self._fail(request, reply, error)

        def handle(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
            task = asyncio.get_running_loop().create_task(run(request, target, reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return handle


def make_route(path: str, operation: AnyOperation, **handlers: Handler) -> Route:
    return Route(paths.template(path).pattern, operation, handlers, {})


def _target_of(values: dict[str, str]) -> PathTarget:
    return PathTarget(values.get("name", ""), values.get("version", ""), values.get("repository", ""), values)


def _direct(answer: Answer) -> Handler:
    def handle(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
        reply(answer(request, target))

    return handle


def _later(feature: str) -> Handler:
    """A route that is known and not built yet."""

    def refuse(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
        raise Unsupported(f"{feature} is not available in this version of Headrace")

    return refuse


def _shared_memory(kind: Kind, region: str) -> list[Route]:
    def status(request: HttpRequest, target: PathTarget) -> HttpReply:
        require_status(kind, target.name)
        return json_reply([])

    def refuse(request: HttpRequest, target: PathTarget) -> HttpReply:
        raise refuse_change()

    return [
        make_route(f"{region}/status", Operation.SHARED_MEMORY_STATUS, GET=_direct(status)),
        make_route(f"{region}/register", Operation.SHARED_MEMORY_REGISTER, POST=_direct(refuse)),
        make_route(f"{region}/unregister", Operation.SHARED_MEMORY_UNREGISTER, POST=_direct(refuse)),
    ]
