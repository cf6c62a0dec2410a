"""Remote calls between two processes, in both directions, as JSON: for calls that are rare. Event loop only."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headrace.errors import CallerError, Code, HeadraceError, InternalError, Unavailable, summary
from headrace_processes.ipc.framing import Frame, Kind, ProtocolError
from headrace_processes.ipc.json_parts import json_frame, read_json


class JsonCalls:
    """The calls on one channel. ``send`` writes a message. The peer may call ``methods`` by name; their results must be
    values that JSON can express."""

    def __init__(
        self, send: Callable[[bytes], None], methods: Mapping[str, Callable[..., Awaitable[Any]]] | None = None
    ) -> None:
        self._send = send
        self.methods = methods or {}
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._end_reason = ""

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call ``method`` of the peer and return its result.

        Raises `CallerError` with the code and message of an error of the peer, and `Unavailable` if it disconnects.
        """
        if self._end_reason:
            raise Unavailable(self._end_reason)
        call = next(self._numbers)
        answer = self._pending[call] = asyncio.get_running_loop().create_future()
        self._send(json_frame(Kind.CALL, {"id": call, "method": method, "arguments": arguments}))
        try:
            return await answer
        finally:
            self._pending.pop(call, None)

    def receive(self, message: Frame) -> bool:
        """Handle a CALL or RESULT. Return False for any other kind. Raises `ProtocolError`."""
        if message.kind not in (Kind.CALL, Kind.RESULT):
            return False
        content = read_json(message)
        try:
            if message.kind == Kind.CALL:
                method = self.methods[content["method"]]
                task = asyncio.ensure_future(self._answer(content["id"], method, content["arguments"]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return True
            answer = self._pending.pop(content["id"], None)
            if answer is not None and not answer.done():  # the caller still waits
                if "code" in content:
                    # The peer has already logged the error.
                    answer.set_exception(CallerError(content["message"], Code(content["code"])))
                else:
                    answer.set_result(content["value"])
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"kind {message.kind}: {type(error).__name__}: {error}") from error
        return True

    def close(self, reason: str) -> None:
        """Fail all calls, pending and future, with `Unavailable` and the message ``reason``: the peer has disconnected.
        Calls that the peer has made keep running."""
        self._end_reason = reason
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(Unavailable(reason))

    async def _answer(self, call: int, method: Callable[..., Awaitable[Any]], arguments: list[Any]) -> None:
        result: dict[str, Any]
        try:
            result = {"value": await method(*arguments)}
        except Exception as error:
            reported = error if isinstance(error, HeadraceError) else InternalError(summary(error))
            result = {"code": reported.code.value, "message": reported.message}
        self._send(json_frame(Kind.RESULT, {"id": call, **result}))
