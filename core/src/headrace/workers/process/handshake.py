"""What a child is asked and answers once: whether its instance has loaded, whether it is ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import IntEnum

from headrace.errors import Code, LoadError, Unavailable
from headrace.ipc.framing import FIRST_OWN_KIND, VERSION, Frame, ProtocolError, frame
from headrace.ipc.json_parts import read_json

log = logging.getLogger(__name__)


class ChildKind(IntEnum):
    """The kinds of frame that a child and its server have beside `headrace.ipc.framing.Kind`."""

    LOAD = FIRST_OWN_KIND  # to the child; JSON: an instance spec
    LOADED = FIRST_OWN_KIND + 1  # JSON: what the server needs to know of the instance
    FAILED = FIRST_OWN_KIND + 2  # JSON: code, message, traceback
    CLOSE = FIRST_OWN_KIND + 3  # to the child: close the instance and exit
    CHECK = FIRST_OWN_KIND + 4  # to the child: ask the instance whether it is ready
    CHECKED = FIRST_OWN_KIND + 5  # JSON: ready, reason
    UPDATE = FIRST_OWN_KIND + 6  # handle, operation, value: of a metric


class Handshake:
    """With the instance ``name``, by ``send``. ``loaded`` gives whether the instance has an ``is_ready``.

    Event loop of the server only.
    """

    def __init__(self, name: str, send: Callable[[bytes], None]) -> None:
        self._name, self._send = name, send
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[bool] = self._loop.create_future()
        self._checked: asyncio.Future[tuple[bool, str]] | None = None

    async def check(self) -> bool:
        """Whether the instance says that it is ready; raises `Unavailable` if it says why not."""
        if self._checked is None:
            self._checked = self._loop.create_future()
            self._send(frame(ChildKind.CHECK, 0))
        ready, reason = await asyncio.shield(self._checked)
        if reason:
            raise Unavailable(reason)
        return ready

    def hear(self, message: Frame) -> bool:
        """Take LOADED, FAILED or CHECKED; False if it is something else. Raises `ProtocolError`."""
        if message.kind == ChildKind.CHECKED:
            found = read_json(message)
            checked, self._checked = self._checked, None
            if checked is not None:
                checked.set_result((bool(found["ready"]), str(found["reason"])))
        elif message.kind == ChildKind.FAILED:
            found = read_json(message)
            log.error("instance '%s' failed to load:\n%s", self._name, found["traceback"].rstrip())
            self.loaded.set_exception(LoadError(found["message"], Code(found["code"])))
        elif message.kind == ChildKind.LOADED:
            found = read_json(message)
            if found["version"] != VERSION:
                raise ProtocolError(f"version {found['version']} of the schema, not {VERSION}")
            self.loaded.set_result(bool(found["has_check"]))
        else:
            return False
        return True

    def end(self, reason: str, report: str) -> None:
        """The child has died, for ``reason`` and with this crash report: there will be no more answers."""
        if self._checked is not None and not self._checked.done():
            self._checked.set_result((False, reason))
        if not self.loaded.done():
            self.loaded.set_exception(LoadError(f"{reason} while it was loading\n{report}".rstrip()))
