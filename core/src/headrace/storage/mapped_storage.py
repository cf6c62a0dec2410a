"""Some models of a storage under other names: a repository that is registered while the server runs.

Source: docs/spec/behaviours.md section 5.9.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path

from headrace.storage.base import Storage


class MappedStorage(Storage):
    """The models of ``storage`` that ``names`` has, by the name under which they are served; all if it is empty."""

    name = "mapped"

    def __init__(self, storage: Storage, names: Mapping[str, str]) -> None:
        super().__init__(storage.url, storage.options)
        self._storage, self.names = storage, names

    def models(self) -> Collection[str]:
        stored = self._storage.models()
        return [name for name, own in self.names.items() if own in stored] if self.names else stored

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return self._storage.fingerprint(self._own(model))

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        return self._storage.fetch(self._own(model), files, new_directory)

    def size(self, model: str, files: Collection[str]) -> int:
        return self._storage.size(self._own(model), files)

    def release(self, model: str, directory: Path) -> None:
        self._storage.release(self._own(model), directory)

    def close(self) -> None:
        self._storage.close()

    def _own(self, model: str) -> str:
        return self.names.get(model, model)
