"""The program of one of several servers that share their ports (``headrace serve --workers``): `headrace.cli.serve`,
told by its supervisor what a signal tells a server that is alone."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from headrace.cli import command_line
from headrace.cli.serve import option_groups, run_loop, serve_until
from headrace.errors import HeadraceError, InternalError, summary
from headrace.ipc.framing import Frame, Kind
from headrace.ipc.json_parts import json_frame, read_json
from headrace.server import Server
from headrace.supervision.parent_line import ParentLine, run
from headrace.supervision.supervised_process import LifeKind
from headrace.telemetry.logs import Log, LogSettings
from headrace.telemetry.metric_sums import write_families


def serve(*, channel: int, crash_file: int) -> NoReturn:
    """What `headrace.supervision.bootstrap` calls, with inherited descriptors."""
    run(lambda: run_loop(_serve(socket.socket(fileno=channel))), crash_file, [channel])


async def _serve(channel: socket.socket) -> int:
    line = RunningServer()
    await line.connect(channel)
    told = await line.told
    words = told["words"]
    given, _ = command_line.read_options(words, os.environ, option_groups(words))
    # The supervisor has claimed the ports, for all of them; and it answers the metrics page.
    options = replace(given, **told["ports"], reuse_http_port=True, reuse_grpc_port=True, allow_metrics=False)
    with contextlib.closing(Log(LogSettings.from_options(options))):
        server = Server(options)
        line.methods = {"measure": lambda: write_families(server.engine.collect())}
        return await serve_until(line.draining, server, line.tell_started, tells_tables=told["tells_tables"])


class RunningServer(ParentLine):
    """This process's end of the channel. ``methods`` are what the supervisor may ask, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.methods: dict[str, Callable[..., Any]] = {}

    def tell_started(self) -> None:
        self.send(json_frame(LifeKind.STARTED, {}))

    def hear(self, message: Frame) -> None:
        if message.kind != Kind.CALL:
            super().hear(message)
            return
        found = read_json(message)
        try:
            answer = {"value": self.methods[found["method"]](*found["arguments"])}
        except Exception as error:
            told = error if isinstance(error, HeadraceError) else InternalError(summary(error))
            answer = {"code": told.code.value, "message": told.message}
        self.send(json_frame(Kind.RESULT, {"id": found["id"], **answer}))
