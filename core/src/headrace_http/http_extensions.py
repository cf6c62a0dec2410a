"""Headrace's own extensions over HTTP: every path that it answers (docs/spec/behaviours.md section 1.2).

Their routes answer by callback. If a path fits two routes, the first one answers, in Triton's order: for example,
``/v2/models/stats`` is the statistics of all models, not the metadata of a model called ``stats``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from headrace.engine import Operation
from headrace.frontends.extension import Addition, Extension
from headrace_http import url_paths as paths
from headrace_http.plugin_routes import HttpRoute

if TYPE_CHECKING:
    from headrace_http.route_handlers import Handler, RouteHandlers


class CallbackRoute(HttpRoute):
    """A route whose handler answers by callback, without a task for each request."""

    make: ClassVar[Callable[[RouteHandlers], Handler]]

    def handler(self, handlers: RouteHandlers) -> Handler:
        return type(self).make(handlers)


def callback_route(
    method: str, path: str, operation: Operation, make: Callable[[RouteHandlers], Handler]
) -> type[CallbackRoute]:
    """Return the route of ``method`` and ``path``. ``make`` returns its handler, once per port."""
    members = {"name": f"{method} {path}", "operation": operation, "make": staticmethod(make)}
    return type("CallbackRoute", (CallbackRoute,), members)


class HttpStatistics(Extension):
    name: ClassVar[str] = "http_statistics"
    announces = ("statistics",)
    adds: ClassVar[tuple[type[Addition], ...]] = tuple(
        callback_route("GET", path, Operation.STATISTICS, lambda handlers: handlers.direct(handlers.about.statistics))
        for path in (paths.ALL_STATISTICS, paths.STATISTICS)
    )


class HttpInference(Extension):
    """The protocol itself: inference, health and metadata."""

    name: ClassVar[str] = "http_inference"
    adds: ClassVar[tuple[type[Addition], ...]] = (
        callback_route("POST", paths.INFER, Operation.INFER, lambda handlers: handlers.inference),
        callback_route(
            "GET",
            paths.MODEL_READY,
            Operation.MODEL_READY,
            lambda handlers: handlers.perhaps_task(handlers.about.model_ready),
        ),
        callback_route(
            "GET", paths.MODEL, Operation.MODEL_METADATA, lambda handlers: handlers.direct(handlers.about.model)
        ),
        callback_route(
            "GET", paths.SERVER, Operation.SERVER_METADATA, lambda handlers: handlers.direct(handlers.about.server)
        ),
        callback_route("GET", paths.LIVE, Operation.LIVE, lambda handlers: handlers.direct(handlers.about.live)),
        callback_route(
            "GET", paths.READY, Operation.READY, lambda handlers: handlers.perhaps_task(handlers.about.ready)
        ),
    )


class HttpModelConfiguration(Extension):
    name: ClassVar[str] = "http_model_configuration"
    announces = ("model_configuration",)
    adds: ClassVar[tuple[type[Addition], ...]] = (
        callback_route(
            "GET", paths.CONFIG, Operation.MODEL_CONFIG, lambda handlers: handlers.direct(handlers.about.config)
        ),
    )


class HttpModelRepository(Extension):
    name: ClassVar[str] = "http_model_repository"
    announces = ("model_repository", "model_repository(unload_dependents)")
    adds: ClassVar[tuple[type[Addition], ...]] = (
        callback_route("POST", paths.INDEX, Operation.INDEX, lambda handlers: handlers.task(handlers.repository.index)),
        callback_route(
            "POST", paths.LOAD, Operation.LOAD, lambda handlers: handlers.control_task(handlers.repository.load)
        ),
        callback_route(
            "POST", paths.UNLOAD, Operation.UNLOAD, lambda handlers: handlers.control_task(handlers.repository.unload)
        ),
    )


class HttpExplain(Extension):
    """Explains the last batches. Not in Triton."""

    name: ClassVar[str] = "http_explain"
    adds: ClassVar[tuple[type[Addition], ...]] = (
        callback_route(
            "GET", paths.EXPLAIN, Operation.EXPLAIN, lambda handlers: handlers.direct(handlers.about.explain)
        ),
    )


OWN: list[type[Extension]] = [HttpStatistics, HttpInference, HttpModelConfiguration, HttpModelRepository, HttpExplain]
