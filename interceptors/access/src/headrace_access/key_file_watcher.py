"""The access file of a running server, and its key sets: read again when they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from headrace import ConfigError, FileChanges
from headrace_access.key_file import KeyFile
from headrace_access.tokens import Tokens

#: Its lines are in the audit log, too.
log = logging.getLogger("headrace.audit.access")
#: If the last check is older than this, callers wait for the next check, at most this long.
_TRUSTED_S = 2.0


class KeyFileWatcher:
    """The content of ``path``. If a changed file is invalid, the former content stays in use.

    Event loop only, after creation.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Blocks. Raises `ConfigError`."""
        self._path = path
        self._reading: asyncio.Task[None] | None = None
        self._changes, self.file = _read(path)
        self._checked_s, self._is_old = monotonic(), False
        self.tokens = Tokens(self.file)
        self.tokens.on_forget = self._changed
        #: Called when earlier decisions may no longer hold.
        self.on_change: Callable[[], None] = lambda: None

    def check(self) -> asyncio.Task[None] | None:
        """Start to read a changed file, and to fetch old key sets, at most once per second.

        Return a task for `checked` if the last check was more than 2 s ago, so a key may be revoked since.
        """
        if self._reading is None and self._changes.are_due():
            now_s = monotonic()
            self._checked_s, self._is_old = now_s, now_s - self._checked_s >= _TRUSTED_S
            self._reading = asyncio.get_running_loop().create_task(self._read_if_changed())
            self.tokens.refresh()
        return self._reading if self._is_old else None

    async def checked(self, reading: asyncio.Task[None]) -> None:
        """Wait for the task of `check`, at most 2 s, in case the disk does not answer."""
        await asyncio.wait([reading], timeout=_TRUSTED_S)  # a caller that disconnects does not cancel it

    def _changed(self) -> None:
        self.on_change()

    async def _read_if_changed(self) -> None:
        try:
            if not await asyncio.to_thread(self._changes.found):
                return
            self._changes, self.file = await asyncio.to_thread(_read, self._path)
        except RuntimeError:
            return  # the server stops, and its threads have ended
        except ConfigError as error:
            log.error("the former keys stay in use: %s", error.message)
        else:
            self.tokens = Tokens(self.file, self.tokens)
            self.tokens.on_forget = self._changed
            self.on_change()
            log.info("access file '%s' has changed: %d keys are in use", self._path, len(self.file))
        finally:
            self._reading = None


def _read(path: Path) -> tuple[FileChanges, KeyFile]:
    """Return the content of the file, and the detector of its later changes. Blocks. Raises `ConfigError`."""
    changes, found = FileChanges(path), KeyFile.read(path)
    named = [issuer.keys for issuer in found.issuers.values() if not issuer.has_address]
    if named:
        changes, found = FileChanges(path, *named), KeyFile.read(path)  # again: the files may have changed since
    return changes, found
