"""The program of one of several servers that share their ports (``headrace serve --workers``): `headrace_cli.serve`,
stopped by the supervisor instead of a signal."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import replace
from typing import Any, NoReturn

from headrace.server import Server
from headrace.telemetry.logs import Log, LogSettings
from headrace_cli import command_line
from headrace_cli.serve import find_plugins, run_loop, serve_until
from headrace_cli.server_processes.metric_sums import write_families
from headrace_cli.server_processes.model_changes import SharedControl
from headrace_processes.ipc.framing import Frame
from headrace_processes.ipc.json_calls import JsonCalls
from headrace_processes.ipc.json_parts import json_frame
from headrace_processes.supervision.parent_channel import ParentChannel, run
from headrace_processes.supervision.supervised_process import LifeKind


def serve(*, channel: int, crash_file: int) -> NoReturn:
    """Run the server. Called by `headrace_processes.supervision.bootstrap`, with inherited descriptors."""
    run(lambda: run_loop(_serve(socket.socket(fileno=channel))), channel, crash_file)


async def _serve(channel: socket.socket) -> int:
    line = RunningServer()
    await line.connect(channel)
    settings = await line.settings
    words = settings["words"]
    plugins = find_plugins(words)
    own_options, _ = command_line.read_options(words, os.environ, list(plugins.options))
    # The supervisor has reserved the ports for all servers, and it serves the metrics page.
    options = replace(own_options, **settings["ports"], reuse_http_port=True, reuse_grpc_port=True, allow_metrics=False)
    with contextlib.closing(Log(LogSettings.from_options(options))) as logs:
        server = Server(options, found_plugins=plugins)
        server.engine.log = logs

        async def measure() -> list[Any]:
            return write_families(server.engine.collect())

        async def join() -> None:
            shared = SharedControl(line.calls.ask, server.engine)
            line.calls.methods = {"measure": measure, "change": shared.make}
            await shared.join()

        return await serve_until(line.draining, server, join, line.notify_started, logs_tables=settings["logs_tables"])


class RunningServer(ParentChannel):
    """The connection to the supervisor, in the server."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = JsonCalls(self.send)

    def notify_started(self) -> None:
        self.send(json_frame(LifeKind.STARTED, {}))

    def receive(self, message: Frame) -> None:
        if not self.calls.receive(message):
            super().receive(message)
