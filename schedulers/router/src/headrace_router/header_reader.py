"""The interceptor ``router``: gives routers the headers of requests. It is enabled by ``--router-headers=true``.

A request has its headers only if an interceptor handles it. This one handles requests to routers that read headers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from headrace import AnyOperation, Caller, Interceptor, ServerOptions
from headrace_router.router_options import RouterOptions


class RouterHeaders(Interceptor):
    """Keeps the callers of the requests to routers that read headers."""

    name: ClassVar[str] = "router"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self._options = options.group(RouterOptions)

    @property
    def enabled(self) -> bool:
        return self._options.headers

    def samples(self, operation: AnyOperation, model: Callable[[], str], traceparent: str) -> bool:
        return model() in self._options.board.header_readers

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        return None

    def allowed_callers(self, operation: AnyOperation, transport: str) -> str:
        return ""
