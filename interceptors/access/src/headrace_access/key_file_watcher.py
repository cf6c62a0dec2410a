"""The key file of a running server: read again when it has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from headrace import ConfigError
from headrace_access.key_file import KeyFile

log = logging.getLogger("headrace.access")

#: The file is checked for changes at most this often.
_CHECK_S = 1.0


class KeyFileWatcher:
    """The content of ``path``. A changed file that is wrong leaves the former keys. Event loop only, after creation."""

    def __init__(self, path: Path, clock: Callable[[], float] = monotonic) -> None:
        """Read the file. Blocks. Raises `ConfigError`."""
        self._path, self._clock = path, clock
        self._state, self._checked_s = _state(path), clock()
        self._reading: asyncio.Task[None] | None = None
        self.keys = KeyFile.read(path)

    def current(self) -> KeyFile:
        """Return the keys. Starts to read a changed file in the background."""
        now_s = self._clock()
        if now_s - self._checked_s >= _CHECK_S and self._reading is None:
            self._checked_s = now_s
            self._reading = asyncio.get_running_loop().create_task(self._read_if_changed())
        return self.keys

    async def _read_if_changed(self) -> None:
        try:
            state = await asyncio.to_thread(_state, self._path)
            if state == self._state:
                return
            self._state = state
            self.keys = await asyncio.to_thread(KeyFile.read, self._path)
        except ConfigError as error:
            log.error("the former keys stay in use: %s", error.message)
        else:
            log.info("key file '%s' has changed: %d keys are in use", self._path, len(self.keys))
        finally:
            self._reading = None


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
