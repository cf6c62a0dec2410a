"""Finds, loads and unloads models for a control mode of a plugin."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import HeadraceError
from headrace.models.states import poll_failure
from headrace.storage.repositories import Entry, Fingerprint

if TYPE_CHECKING:
    from headrace.models.control_mode import LoadingParts
    from headrace.models.served import ServedModel


@dataclass(frozen=True, slots=True)
class LoadableModel:
    """A model of the repository. ``needed`` are the models that it calls, which are loaded before it.

    ``file_bytes`` is the size of the files of the versions that would be loaded; 0 if it is unknown.
    """

    name: str
    config: ModelConfig
    file_bytes: int
    needed: Collection[str]


class LoadControl:
    """Loads and unloads models for a `ControlMode`, by its ``parts``. Event loop only."""

    def __init__(self, parts: LoadingParts) -> None:
        self._lifecycle, self._loader, self._repositories, self._slots = parts
        #: By name, the last result of `find`, with the files that it was made of.
        self._models: dict[str, tuple[Fingerprint, LoadableModel]] = {}

    async def names(self) -> Collection[str]:
        """Return the names of all models of the repository. Raises `HeadraceError` if it cannot be read."""
        return list(await asyncio.to_thread(self._repositories.scan))

    async def find(self, name: str) -> LoadableModel | None:
        """Return the model ``name`` as the repository has it now; None if it has no such model.

        Reads the config, unless no file has changed. Raises `HeadraceError` for a config that cannot be loaded.
        """
        return await self._slots.run(self._find, name)

    def _find(self, name: str) -> LoadableModel | None:
        entry = self._repositories.find(name)
        if entry is None:
            self._models.pop(name, None)
            return None
        known, model = self._models.get(name, (None, None))
        if not entry.is_duplicate and known is not None and model is not None and entry.fingerprint() == known:
            return model
        try:
            plan = self._loader.plan(entry)
        except HeadraceError as error:
            raise poll_failure(name, error.message) from error
        assert plan is not None
        plan.opened.close(is_loaded=False)
        needed = {dependency.model for dependency in plan.dependencies}
        model = LoadableModel(name, plan.config, entry.size(plan.fingerprint.files, plan.versions), needed)
        self._models[name] = plan.fingerprint, model
        return model

    async def load(self, name: str) -> None:
        """Load ``name`` and the models that it calls. Return when it serves. Raises `HeadraceError`. Not stopped if
        cancelled."""
        entry: Entry | None = await asyncio.to_thread(self._repositories.find, name)
        if entry is None:
            raise poll_failure(name)
        await self._lifecycle.load(entry)

    async def unload(self, name: str) -> None:
        """Unload ``name``. Return when its last request is answered and its instances have closed."""
        await self._lifecycle.unload(name)
        await self._lifecycle.closed(name)

    def served(self, name: str) -> Sequence[ServedModel]:
        """Return the versions of ``name`` that take requests."""
        record = self._lifecycle.records.get(name)
        return [] if record is None else [v.served for v in record.versions.values() if v.served is not None]

    def all_served(self) -> Collection[str]:
        """Return the names of the models that take requests."""
        return [name for name, record in self._lifecycle.records.items() if record.is_served]
