"""One of several servers that share their ports, as the supervisor has it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import Code, HeadraceError, Unavailable
from headrace.ipc.framing import Frame, Kind
from headrace.ipc.json_parts import json_frame, read_json
from headrace.supervision.supervised_process import LaunchedProcess, SupervisedProcess, launch


class ServerProcess(SupervisedProcess):
    """One life of the server ``number``, which is told ``words``, the command line, and ``ports``, by their options."""

    def __init__(self, number: int, words: Sequence[str], ports: Mapping[str, int], *, tells_tables: bool) -> None:
        super().__init__(f"worker {number}")
        self.number = number
        self._words, self._ports, self._tells_tables = words, ports, tells_tables
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}

    def launch(self) -> LaunchedProcess:
        return launch(self.name, "headrace.cli.server_processes.server_program:serve", {})

    def settings(self) -> Mapping[str, Any]:
        return {"words": list(self._words), "ports": dict(self._ports), "tells_tables": self._tells_tables}

    async def ask(self, method: str, *arguments: Any) -> Any:
        """What the server says. Raises the `HeadraceError` that it raises, and `Unavailable` if it is dead or dies."""
        if not self.is_connected:
            raise Unavailable(f"{self.name} does not run")
        call = next(self._numbers)
        answer = self._asked[call] = self._loop.create_future()
        self.send(json_frame(Kind.CALL, {"id": call, "method": method, "arguments": arguments}))
        try:
            return await answer
        finally:
            self._asked.pop(call, None)

    def hear(self, message: Frame) -> None:
        if message.kind != Kind.RESULT:
            super().hear(message)
            return
        found = read_json(message)
        answer = self._asked.pop(found["id"], None)
        if answer is None or answer.done():  # nobody waits any more
            return
        if "code" in found:
            answer.set_exception(HeadraceError(found["message"], Code(found["code"])))
        else:
            answer.set_result(found["value"])

    def close(self) -> None:
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(Unavailable(self.reason))
