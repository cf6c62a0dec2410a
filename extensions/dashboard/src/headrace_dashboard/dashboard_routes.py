"""The routes of the dashboard."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

from headrace import (
    Addition,
    Engine,
    Extension,
    ExtensionOperation,
    FileRoute,
    HttpCall,
    HttpReply,
    HttpRoute,
    InvalidArgument,
    OptionGroup,
    ServedModel,
    Server,
    Unavailable,
)
from headrace_dashboard.chat_page import CHAT_ROUTES, PAGE
from headrace_dashboard.model_memory import ProcessMemory, server_bytes
from headrace_dashboard.recent_records import RecentRecords

#: Reads counts, latencies and memory of all models.
MODELS = ExtensionOperation("dashboard_models", "statistics")
#: Reads the last log records.
LOG = ExtensionOperation("dashboard_log", "logging")

_JSON = ((b"Content-Type", b"application/json"), (b"Cache-Control", b"no-store"))

#: The number of models that are counted in one turn of the event loop, in about 1 ms.
_MODELS_PER_TURN = 32

#: The servers of this process that have started.
_servers: WeakKeyDictionary[Engine, Server] = WeakKeyDictionary()


def note_server(server: Server) -> None:
    """Note that a server has started. Event loop only."""
    _servers[server.engine] = server


@dataclass(frozen=True)
class DashboardOptions(OptionGroup):
    """The dashboard, a page of the HTTP port for a browser."""

    name: ClassVar[str] = "dashboard"
    enabled: bool = field(default=True, metadata={"help": "Show the dashboard at /dashboard."})
    log_records: int = field(
        default=500, metadata={"help": "Number of log records that the dashboard can show. 0: none."}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.log_records <= 100_000:
            raise ValueError(f"--dashboard-log-records is {self.log_records}; it is from 0 to 100,000")


class DashboardRoute(FileRoute):
    """The dashboard, for a browser"""

    name, file, operation = "GET /dashboard", "page/index.html", PAGE


class DashboardStyleRoute(FileRoute):
    """The style of the dashboard"""

    name, file, operation = "GET /dashboard/dashboard.css", "page/dashboard.css", PAGE


class DashboardScriptRoute(FileRoute):
    """The script of the dashboard"""

    name, file, operation = "GET /dashboard/dashboard.js", "page/dashboard.js", PAGE


class RequestFormRoute(FileRoute):
    """The script of the dashboard that asks models"""

    name, file, operation = "GET /dashboard/request_form.js", "page/request_form.js", PAGE


class ModelsRoute(HttpRoute):
    """Of each loaded model version, the counts since its load and its memory; and the memory of the server

    ``latencies`` are counts of 1, 2, 4, ... µs, without the zeros at the end.
    """

    name = "GET /dashboard/models.json"
    operation = MODELS
    extension: Dashboard

    async def answer(self, call: HttpCall) -> HttpReply:
        server, memory = _servers.get(self.engine), self.extension.memory
        if server is None:
            raise Unavailable("the models are being loaded")
        models = server.served()
        async with self.extension.measuring:
            await asyncio.to_thread(memory.measure, models)
        found: list[object] = []
        for number, model in enumerate(models, 1):
            found.append({**_counts(model), "memory": [each._asdict() for each in memory.of(model)]})
            if number % _MODELS_PER_TURN == 0:
                await asyncio.sleep(0)
        document = {"server_bytes": server_bytes(), "models": found}
        return HttpReply(200, _JSON, [await asyncio.to_thread(_encode, document)])


def _counts(model: ServedModel) -> dict[str, object]:
    numbers = model.snapshot()
    latencies = numbers.executions.request_us.counts
    while latencies and not latencies[-1]:
        latencies.pop()
    return {
        "name": model.name,
        "version": str(model.version),
        "success": numbers.success.count,
        "failed": numbers.fail.count,
        "executions": numbers.executions.execution_count,
        "rows": numbers.executions.inference_count,
        "latencies": latencies,
    }


class LogRoute(HttpRoute):
    """The last log records, oldest first; with ``?after=N``, those behind the number N"""

    name = "GET /dashboard/log.json"
    operation = LOG
    extension: Dashboard

    async def answer(self, call: HttpCall) -> HttpReply:
        (after, *_) = call.query.get("after", ["0"])
        if not after.isdecimal() or len(after) > 18:
            raise InvalidArgument(f"'after' is '{after[:100]}'; it is the number of a log record")
        found = self.extension.records.after(int(after))
        return HttpReply(200, _JSON, [await asyncio.to_thread(_encode, found)])


class Dashboard(Extension):
    """Keeps the last log records of the process while it is enabled, and the last measured memory of models."""

    name: ClassVar[str] = "dashboard"
    adds: ClassVar[Sequence[type[Addition]]] = (
        DashboardRoute,
        DashboardStyleRoute,
        DashboardScriptRoute,
        RequestFormRoute,
        *CHAT_ROUTES,
        ModelsRoute,
        LogRoute,
    )

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        options = engine.options.group(DashboardOptions)
        self.records = RecentRecords(options.log_records)
        self.memory, self.measuring = ProcessMemory(), asyncio.Lock()
        if options.enabled and options.log_records:
            logging.getLogger("headrace").addHandler(self.records)

    @property
    def enabled(self) -> bool:
        return self.engine.options.group(DashboardOptions).enabled

    def close(self) -> None:
        logging.getLogger("headrace").removeHandler(self.records)


def _encode(found: object) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()
