"""Looks at the repository again and again, and has what changed loaded, reloaded and unloaded.

For control mode ``poll`` (docs/spec/behaviours.md section 5.2) and for ``--dev``. These differ in when a
change counts: in mode poll at once, and a load that failed is tried again at every look; with
``--dev``, where people are saving files, once two looks in a row have seen the same, and a load
that failed is tried again when the files have changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TypeAlias

from headrace.models.lifecycle import Lifecycle
from headrace.models.model_files import Fingerprint, take_fingerprint
from headrace.models.repository import Entry, Repository

log = logging.getLogger(__name__)

DEV_INTERVAL_S = 0.5

#: What a look sees: by name, every model and what its directories hold.
Fingerprints: TypeAlias = "dict[str, tuple[Entry, tuple[Fingerprint, ...]]]"


class Watcher:
    """Keeps the models of ``lifecycle`` as they are in ``repository``. Event loop only.

    With ``known_only``, models that are not served are left alone.
    """

    def __init__(
        self, repository: Repository, lifecycle: Lifecycle, interval_s: float, *, dev: bool, known_only: bool
    ) -> None:
        self._repository = repository
        self._lifecycle = lifecycle
        self._interval_s = interval_s
        self._dev = dev
        self._known_only = known_only
        self._handled: Fingerprints = {}
        self._task: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """Remember what there is before it is loaded: whatever is different later has changed."""
        self._handled = await asyncio.to_thread(self._look)

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.ensure_future(self._watch())

    def stop(self) -> None:
        """Look no more; what is being loaded goes on."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        before = self._handled
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                found = await asyncio.to_thread(self._look)
                await self._follow(
                    {name for name in {*found, *self._handled} if self._is_due(name, before, found)}, found
                )
                before = found
            except Exception:
                log.exception("cannot look at the repository")

    def _look(self) -> Fingerprints:
        entries = self._repository.scan()
        return {name: (entry, tuple(map(take_fingerprint, entry.paths))) for name, entry in entries.items()}

    def _is_due(self, name: str, before: Mapping[str, object], found: Mapping[str, object]) -> bool:
        """Whether ``name`` has changed, and if people are at it, whether they seem to have finished."""
        has_changed = found.get(name) != self._handled.get(name)
        return has_changed and not (self._dev and found.get(name) != before.get(name))

    async def _follow(self, names: set[str], found: Fingerprints) -> None:
        if self._known_only:
            names = {name for name in names if self._lifecycle.is_served(name)}
        await asyncio.gather(*(self._follow_one(name, found) for name in sorted(names)))

    async def _follow_one(self, name: str, found: Fingerprints) -> None:
        if name not in found:
            log.info("'%s' is gone from the repository: unloading it", name)
            await self._lifecycle.remove(name)
            del self._handled[name]
            return
        log.info("'%s' %s: loading it", name, "has changed" if name in self._handled else "is new in the repository")
        failures = await self._lifecycle.load_all([found[name][0]])
        if self._dev or not failures:
            self._handled[name] = found[name]
