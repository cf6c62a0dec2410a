"""The key file of a running server: read again when it has changed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from headrace import ConfigError, FileChanges
from headrace_access.key_file import KeyFile

log = logging.getLogger("headrace.access")


class KeyFileWatcher:
    """The content of ``path``. A changed file that is wrong leaves the former keys. Event loop only, after creation."""

    def __init__(self, path: Path) -> None:
        """Read the file. Blocks. Raises `ConfigError`."""
        self._path, self._changes = path, FileChanges(path)
        self._reading: asyncio.Task[None] | None = None
        self.keys = KeyFile.read(path)

    def current(self) -> KeyFile:
        """Return the keys. Starts to read a changed file in the background."""
        if self._reading is None and self._changes.are_due():
            self._reading = asyncio.get_running_loop().create_task(self._read_if_changed())
        return self.keys

    async def _read_if_changed(self) -> None:
        try:
            if not await asyncio.to_thread(self._changes.found):
                return
            self.keys = await asyncio.to_thread(KeyFile.read, self._path)
        except ConfigError as error:
            log.error("the former keys stay in use: %s", error.message)
        else:
            log.info("key file '%s' has changed: %d keys are in use", self._path, len(self.keys))
        finally:
            self._reading = None
