"""The handlers of one port: each has its reply at once, or runs as a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from headrace.errors import HeadraceError
from headrace_http.handlers import DescriptionHandlers, RepositoryHandlers
from headrace_http.located_tensors import inference_handler
from headrace_http.message import Cancel, HttpReply, HttpRequest, Reply
from headrace_http.url_paths import PathTarget

if TYPE_CHECKING:
    from headrace.engine import Engine
    from headrace_http.caller_limits import HttpLimits
    from headrace_http.inference import InferenceHandler

#: Answers a request through its reply, now or later. Returns a function that cancels it, or None.
Handler: TypeAlias = Callable[[HttpRequest, PathTarget, Reply], "Cancel | None"]


class RouteHandlers:
    """The handlers that the routes of one port share. ``log_error`` logs an error, and ``fail`` answers one."""

    def __init__(
        self,
        engine: Engine,
        log_error: Callable[[HeadraceError, HttpRequest], None],
        fail: Callable[[HttpRequest, Reply, Exception], None],
        transport: str,
        limits: HttpLimits,
        has_sockets: bool,
    ) -> None:
        self._engine = engine
        self.log_error, self._fail = log_error, fail
        #: The `Caller.transport` of their callers.
        self.transport = transport
        #: The limits of the port.
        self.limits = limits
        #: True if the host has WebSockets.
        self.has_sockets = has_sockets
        self._tasks: set[asyncio.Task[None]] = set()

    @cached_property
    def about(self) -> DescriptionHandlers:
        return DescriptionHandlers(self._engine)

    @cached_property
    def repository(self) -> RepositoryHandlers:
        return RepositoryHandlers(self._engine)

    @cached_property
    def inference(self) -> InferenceHandler:
        return inference_handler(self._engine)

    def direct(self, answer: Callable[[HttpRequest, PathTarget], HttpReply]) -> Handler:
        """Return a handler that has the reply at once."""

        def handle(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
            reply(answer(request, target))

        return handle

    def control_task(self, coroutine: Callable[[HttpRequest, PathTarget, Reply], Awaitable[HttpReply]]) -> Handler:
        """Return a handler as `task` does. ``coroutine`` gets the reply, too, which has the caller."""

        def handle(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
            self.task(lambda request, target: coroutine(request, target, reply))(request, target, reply)

        return handle

    def perhaps_task(self, answer: Callable[[HttpRequest, PathTarget], HttpReply | Awaitable[HttpReply]]) -> Handler:
        """Return a handler that has the reply at once, or awaits it as `task` does."""

        def handle(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
            found = answer(request, target)
            if isinstance(found, HttpReply):
                reply(found)
                return

            async def wait(request: HttpRequest, target: PathTarget) -> HttpReply:
                return await found

            self.task(wait)(request, target, reply)

        return handle

    def task(self, coroutine: Callable[[HttpRequest, PathTarget], Awaitable[HttpReply]]) -> Handler:
        """Return a handler that runs ``coroutine`` to its end, even if the caller disconnects."""

        async def run(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
            try:
                reply(await coroutine(request, target))
            except HeadraceError as error:
                # Without its frames, which hold the request as long as the error lives.
                self._fail(request, reply, error.with_traceback(None))
            except Exception as error:
                self._fail(request, reply, error)

        def handle(request: HttpRequest, target: PathTarget, reply: Reply) -> None:
            task = asyncio.get_running_loop().create_task(run(request, target, reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return handle
