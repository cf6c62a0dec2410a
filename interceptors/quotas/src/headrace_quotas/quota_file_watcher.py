"""The quota file of a running server: read again when it has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace import ConfigError, FileChanges
from headrace_quotas.quota_file import QuotaBook

log = logging.getLogger("headrace.quotas")


class QuotaFileWatcher:
    """The content of ``path``. If a changed file is invalid, the former quotas stay in use.

    Event loop only, after creation.
    """

    def __init__(self, path: Path, changed: Callable[[QuotaBook], Awaitable[None]]) -> None:
        """Read the file. Blocks. Raises `ConfigError`. ``changed`` is called with each later content."""
        self._path, self._changes, self._changed = path, FileChanges(path), changed
        self._reading: asyncio.Task[None] | None = None
        self.book = QuotaBook.read(path)

    def poll(self) -> None:
        """If the file has changed, start to read it in the background."""
        if self._reading is None and self._changes.are_due():
            self._reading = asyncio.get_running_loop().create_task(self._read_if_changed())

    async def _read_if_changed(self) -> None:
        try:
            if not await asyncio.to_thread(self._changes.found):
                return
            self.book = await asyncio.to_thread(QuotaBook.read, self._path)
        except RuntimeError:
            return  # the server stops, and its threads have ended
        except ConfigError as error:
            log.error("the former quotas stay in use: %s", error.message)
        else:
            await self._changed(self.book)
            log.info("quota file '%s' has changed: its quotas are in use", self._path)
        finally:
            self._reading = None
