"""What a child is asked and answers once: whether its instance has loaded, whether it is ready. Event loop only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from headrace.errors import Code, LoadError, Unavailable
from headrace.workers.process.wire import notes
from headrace.workers.process.wire.failure import WireError
from headrace.workers.process.wire.frames import VERSION, Frame, Kind, frame

log = logging.getLogger(__name__)


class Questions:
    """To the instance ``name``, by ``send``. ``loaded`` gives whether the instance has an ``is_ready``."""

    def __init__(self, name: str, send: Callable[[bytes], None]) -> None:
        self._name, self._send = name, send
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[bool] = self._loop.create_future()
        self._checked: asyncio.Future[tuple[bool, str]] | None = None

    async def check(self) -> bool:
        """Whether the instance says that it is ready; raises `Unavailable` if it says why not."""
        if self._checked is None:
            self._checked = self._loop.create_future()
            self._send(frame(Kind.CHECK, 0))
        ready, reason = await asyncio.shield(self._checked)
        if reason:
            raise Unavailable(reason)
        return ready

    def hear(self, message: Frame) -> None:
        """Take LOADED, FAILED or CHECKED. Raises `WireError`."""
        found = notes.read_json(message)
        if message.kind is Kind.CHECKED:
            checked, self._checked = self._checked, None
            if checked is not None:
                checked.set_result((bool(found["ready"]), str(found["reason"])))
        elif message.kind is Kind.FAILED:
            log.error("instance '%s' failed to load:\n%s", self._name, found["traceback"].rstrip())
            self.loaded.set_exception(LoadError(found["message"], Code(found["code"])))
        elif found["version"] != VERSION:
            raise WireError(f"version {found['version']} of the schema, not {VERSION}")
        else:
            self.loaded.set_result(bool(found["has_check"]))

    def end(self, reason: str, words: str) -> None:
        """The child has died, for ``reason`` and with these last words: there will be no more answers."""
        if self._checked is not None and not self._checked.done():
            self._checked.set_result((False, reason))
        if not self.loaded.done():
            self.loaded.set_exception(LoadError(f"{reason} while it was loading\n{words}".rstrip()))
