"""The paths of Triton's extensions that are not installed. They answer like a Triton that was built without them.

These routes are tried last, so an installed extension with the same path replaces them.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.engine import Operation
from headrace.errors import Unsupported
from headrace_hosts.absent_extensions import Kind, note_absent, refuse_unknown_region, region_change_error
from headrace_http.message import HttpRequest, Reply, json_reply
from headrace_http.route_handlers import Handler
from headrace_http.url_paths import MODEL, PathTarget


class AbsentRoute(NamedTuple):
    """A path of ``extension``, with its handlers by method."""

    extension: str
    path: str
    operation: Operation
    handlers: dict[str, Handler]


def absent_routes() -> list[AbsentRoute]:
    """Return all absent routes."""
    routes = [
        AbsentRoute(
            "logging", "/v2/logging", Operation.LOG_SETTINGS, _refusing("the log settings extension", "GET", "POST")
        ),
        AbsentRoute(
            "generate", f"{MODEL}/generate[_stream]", Operation.GENERATE, _refusing("the generate extension", "POST")
        ),
        AbsentRoute(
            "trace", "/v2[/models/{name}]/trace/setting", Operation.TRACE_SETTINGS, _refusing("tracing", "GET", "POST")
        ),
        *_shared_memory("system"),
        *_shared_memory("cuda"),
    ]
    return [
        route._replace(handlers={method: _noted(route.extension, each) for method, each in route.handlers.items()})
        for route in routes
    ]


def _noted(extension: str, handler: Handler) -> Handler:
    def handle(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
        note_absent(extension)
        handler(request, target, reply)

    return handle


def _refusing(feature: str, *methods: str) -> dict[str, Handler]:
    def refuse(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
        raise Unsupported(f"{feature} is not available in this version of Headrace")

    return dict.fromkeys(methods, refuse)


def _shared_memory(kind: Kind) -> list[AbsentRoute]:
    def status(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
        refuse_unknown_region(kind, target.name)
        reply(json_reply([]))

    def refuse(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
        raise region_change_error()

    region, extension = f"/v2/{kind}sharedmemory[/region/{{name}}]", f"{kind}_shared_memory"
    return [
        AbsentRoute(extension, f"{region}/status", Operation.SHARED_MEMORY_STATUS, {"GET": status}),
        AbsentRoute(extension, f"{region}/register", Operation.SHARED_MEMORY_REGISTER, {"POST": refuse}),
        AbsentRoute(extension, f"{region}/unregister", Operation.SHARED_MEMORY_UNREGISTER, {"POST": refuse}),
    ]
