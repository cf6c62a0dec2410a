"""The bytes of one request to the ASGI application in the memory budget: its body, then its response."""

from __future__ import annotations

import asyncio

from headrace.errors import OutOfMemory
from headrace_hosts.held_bytes import HeldBytes
from headrace_hosts.held_memory import no_memory
from headrace_http.request_body import DIRECT_BYTES

#: A body of unknown length asks for memory in steps of at least 1 MiB.
_STEP_BYTES = 1 << 20


class RequestMemory:
    """The bytes of one request, and of its response until the ASGI server has taken it. Event loop only.

    The ASGI server has its own limits on slow callers, so this is never ended as a slow holder.
    """

    waits_for_peer = is_slow = False
    #: Unknown here: the access log of the ASGI server has it.
    peer = ""

    def __init__(self, budget: HeldBytes) -> None:
        self._budget = budget
        #: The largest body that can ever fit.
        self.most_bytes = budget.largest_bytes
        self.kept_bytes = 0
        self._allowed_bytes = self._wanted_bytes = 0
        self._turn: asyncio.Future[None] | None = None

    async def arrived(self, body_bytes: int, missing_bytes: int | None) -> None:
        """Count ``body_bytes`` that have arrived. If memory is short, return when the rest may arrive.

        ``missing_bytes`` is None if the length is unknown. Raises `OutOfMemory`.
        """
        if body_bytes <= DIRECT_BYTES or body_bytes < self._allowed_bytes:
            return
        self._hold(body_bytes)
        if self._budget.is_tight and missing_bytes != 0:
            self._wanted_bytes = max(_STEP_BYTES, body_bytes) if missing_bytes is None else missing_bytes
            self._turn = asyncio.get_running_loop().create_future()
            self._budget.ask(self, self._wanted_bytes)
            try:
                await self._turn
            finally:
                self._budget.leave(self)

    def responds(self, size_bytes: int) -> None:
        """Count a response instead of the body."""
        self._hold(size_bytes if size_bytes > DIRECT_BYTES else 0)

    def end(self) -> None:
        """Count nothing more."""
        self._hold(0)

    def proceed(self) -> None:
        self._allowed_bytes = self.kept_bytes + self._wanted_bytes
        self._budget.set(self, self._allowed_bytes)
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def refuse(self, reason: str) -> None:
        self.shed(no_memory(reason))

    def shed(self, error: OutOfMemory | None = None) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(error or no_memory("the server holds as many bytes as it may (--memory-budget)"))

    def _hold(self, size_bytes: int) -> None:
        if size_bytes or self.kept_bytes:
            self.kept_bytes = size_bytes
            self._budget.set(self, size_bytes)
