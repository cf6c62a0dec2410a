"""Binds the ports, and keeps the frontend processes running (``--frontend-processes``)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from headrace.errors import ConfigError
from headrace.frontends.base import Frontend
from headrace.frontends.listening import announce, listen_http

if TYPE_CHECKING:
    from headrace.config.options import ServerOptions
    from headrace.engine import Engine
    from headrace.frontends.processes.process import FrontendProcess
    from headrace.frontends.processes.whole_calls import Tables
    from headrace.supervision.process_set import ProcessSet

log = logging.getLogger(__name__)


class FrontendProcesses(Frontend):
    """HTTP and gRPC in processes of their own. ``ports`` are those that are listened on, by protocol, once started.

    A process that ends is followed by another: at once the first time, then later and later.
    """

    name: ClassVar[str] = "processes"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.ports: dict[str, int] = {}
        self._processes: ProcessSet[FrontendProcess] | None = None
        self._listeners: list[dict[str, socket.socket]] = []

    @property
    def enabled(self) -> bool:
        options = self.engine.options
        return options.frontend_processes > 0 and (options.allow_http or options.allow_grpc)

    @property
    def shares_port(self) -> bool:
        return self.engine.options.reuse_http_port or self.engine.options.reuse_grpc_port

    async def start(self) -> None:
        """Listen, and start the processes. Raises `Unavailable` naming a busy port, `ConfigError` for what cannot be
        had together, and what a process says that cannot start."""
        refuse(self.engine.options, self.engine.is_intercepted)
        from headrace.frontends.processes.whole_calls import Tables
        from headrace.supervision.process_set import ProcessSet

        await asyncio.to_thread(self._listen)
        self.engine.watch_models(self._tell_models)
        make = partial(self._make, Tables(self.engine))
        try:
            self._processes = ProcessSet(self.engine.options.frontend_processes, make)
            await self._processes.start()
        except BaseException:
            self._end()
            raise
        self._processes.keep()
        for service, protocol, address in self._services():
            announce(self.engine, log, service, f"{address}:{self.ports[protocol]}")

    async def stop(self) -> None:
        self._close_listeners()
        try:
            if self._processes is not None:
                await self._processes.drain()
        finally:
            self._end()

    def _make(self, tables: Tables, number: int) -> FrontendProcess:
        from headrace.frontends.processes.process import FrontendProcess

        return FrontendProcess(f"frontend process {number}", self.engine, tables, self._listeners[number])

    def _tell_models(self) -> None:
        for process in self._processes.processes if self._processes is not None else ():
            process.tell_models()

    def _end(self) -> None:
        """Leave nothing behind."""
        self._close_listeners()
        if self._processes is not None:
            self._processes.end()

    # ------------------------------------------------------------------ the ports

    def _services(self) -> list[tuple[str, str, str]]:
        options = self.engine.options
        found = [("GRPCInferenceService", "grpc", options.grpc_address)] if options.allow_grpc else []
        return [*found, ("HTTPService", "http", options.http_address)] if options.allow_http else found

    def _listen(self) -> None:
        """One socket per process and protocol, so that the system hands out the connections. Raises `Unavailable`."""
        from headrace_grpc.native_host import listen

        options = self.engine.options
        count = options.frontend_processes
        self._listeners = [{} for _ in range(count)]
        try:
            if options.allow_grpc:
                self._bind("grpc", partial(listen, options.grpc_address), options.grpc_port, options.reuse_grpc_port)
            if options.allow_http:
                self._bind(
                    "http", partial(listen_http, options.http_address), options.http_port, options.reuse_http_port
                )
        except BaseException:
            self._close_listeners()
            raise

    def _bind(self, protocol: str, bind: Callable[[int, bool], socket.socket], port: int, is_shared: bool) -> None:
        if not is_shared:  # whoever else listens there would get half of the connections
            with bind(port, False) as probe:
                port = probe.getsockname()[1]
        for listeners in self._listeners:
            listeners[protocol] = bind(port, True)
            port = listeners[protocol].getsockname()[1]
        self.ports[protocol] = port

    def _close_listeners(self) -> None:
        for listeners in self._listeners:
            for listener in listeners.values():
                listener.close()


def refuse(options: ServerOptions, is_intercepted: bool) -> None:
    """Raise `ConfigError` for what frontend processes do not do."""
    flag = f"--frontend-processes={options.frontend_processes}"
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(f"{flag} is refused: this system lets no two processes listen on one port")
    if options.grpc_server == "grpcio":
        raise ConfigError(
            f"{flag} and --grpc-server=grpcio are refused together: grpcio takes no socket that another has bound"
        )
    if is_intercepted:
        raise ConfigError(
            f"{flag} is refused where a plugin intercepts requests: their headers do not travel between processes. "
            "Leave the plugin out by --plugins, or the processes"
        )
