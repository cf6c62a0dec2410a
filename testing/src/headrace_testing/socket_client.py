"""A client of a WebSocket route. It uses the package websockets."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Any

import pytest

_LIMIT_S = 30
#: The maximum wait for an answer. A route may send none.
_ANSWER_S = 0.5
#: The maximum time that a route may run after its client has disconnected.
_END_S = 5


class SocketClient:
    """One WebSocket. ``refused_with`` is the HTTP status if it is refused, 0 if it is accepted."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None
        self.refused_with = 0

    def __enter__(self) -> SocketClient:
        client = pytest.importorskip("websockets.sync.client", reason="the package websockets is not installed")
        from websockets.exceptions import InvalidStatus

        try:
            self._connecting = client.connect(self._url, open_timeout=_LIMIT_S, close_timeout=1)
            self._connection = self._connecting.__enter__()
        except InvalidStatus as refused:
            self.refused_with = refused.response.status_code
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connecting.__exit__(kind, error, trace)

    def send(self, message: str | bytes) -> int:
        """Send ``message`` and read one answer. Return the close code if the socket is closed, else 0."""
        from websockets.exceptions import ConnectionClosed

        if self._connection is None:
            return 0
        try:
            self._connection.send(message)
            self._connection.recv(_ANSWER_S)
        except TimeoutError:
            return 0
        except ConnectionClosed:
            return int(self._connection.close_code or 0)
        return 0

    def disconnect(self) -> None:
        """Disconnect without a close frame."""
        if self._connection is not None:
            self._connection.socket.shutdown(socket.SHUT_RDWR)


async def no_socket_is_open() -> bool:
    """Return True as soon as the loop runs no WebSocket route, False after 5 s."""
    end = asyncio.get_running_loop().time() + _END_S
    while any(_is_socket(task) for task in asyncio.all_tasks()):
        if asyncio.get_running_loop().time() > end:
            return False
        await asyncio.sleep(0.02)
    return True


def _is_socket(task: asyncio.Task[Any]) -> bool:
    """True if ``task`` runs a route."""
    return task.get_name().startswith("route GET ")
