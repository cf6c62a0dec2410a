"""One of several servers that share their ports, seen from the supervisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace.errors import Unavailable
from headrace_cli.server_processes.model_changes import Change, ModelChanges
from headrace_processes.ipc.framing import Frame
from headrace_processes.ipc.json_calls import JsonCalls
from headrace_processes.supervision.supervised_process import LaunchedProcess, SupervisedProcess, launch

#: A server that answers nothing for this long, heartbeats included, is replaced. It is long because a model may hold
#: the interpreter's lock for a while. A health probe may time out earlier.
SILENT_S: Final = 120


class ServerProcess(SupervisedProcess):
    """One process of the server ``number``. A restart makes a new object.

    The server gets ``words``, the command line, and ``ports``, by the names of their options. ``changes`` are the model
    changes of all servers.
    """

    max_silent_s = SILENT_S

    def __init__(
        self, number: int, words: Sequence[str], ports: Mapping[str, int], changes: ModelChanges, *, logs_tables: bool
    ) -> None:
        super().__init__(f"worker {number}")
        self.number = number
        self._words, self._ports, self._changes, self._tells_tables = words, ports, changes, logs_tables
        self._calls = JsonCalls(self.send, {"join": self._join, "make": changes.make})

    def launch(self) -> LaunchedProcess:
        return launch(self.name, "headrace_cli.server_processes.server_program:serve", {})

    def settings(self) -> Mapping[str, Any]:
        return {"words": list(self._words), "ports": dict(self._ports), "logs_tables": self._tells_tables}

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of ``method`` in the server. Raises its `HeadraceError`, or `Unavailable` if it dies."""
        if not self.is_connected:
            raise Unavailable(f"{self.name} does not run")
        return await self._calls.ask(method, *arguments)

    def receive(self, message: Frame) -> None:
        if not self._calls.receive(message):
            super().receive(message)

    def close(self) -> None:
        self._calls.close(self.reason)

    async def _join(self) -> list[Change]:
        return await self._changes.join(self)
