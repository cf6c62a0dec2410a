"""The model repositories of a server: their models, and the files of these on this machine while they are used.

A `Repository` is a `Storage` with checked results and worded errors.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Hashable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.options import ServerOptions
from headrace.errors import (
    AlreadyExists,
    Code,
    ConfigError,
    HeadraceError,
    LoadError,
    NotFound,
    PluginError,
    plugin_errors,
)
from headrace.storage.base import Storage
from headrace.storage.local_directory import LocalDirectory
from headrace.storage.local_storage import check_files, scheme_of, split_name
from headrace.storage.mapped_storage import MappedStorage
from headrace.storage.sent_files import Overrides, SentFiles
from headrace.storage.temporary_directories import TemporaryDirectories, remove

log = logging.getLogger(__name__)

#: The name of a storage for schemes that no storage has.
_OTHERS = "*"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The repository of a model, and a tag for each of its files. Equal as long as nothing has changed."""

    place: str
    files: Mapping[str, Hashable]


class Repository:
    """One ``storage``. ``directories`` creates its private directories. Methods block, and raise `HeadraceError`."""

    def __init__(self, storage: Storage, directories: TemporaryDirectories) -> None:
        self.url = storage.url
        self._storage, self._directories = storage, directories
        #: Its models that are served under these names, whatever their directories and configs say.
        self.mapped_names = frozenset(storage.names) if isinstance(storage, MappedStorage) else frozenset()

    @property
    def whole(self) -> bool:
        """Return as `Storage.whole` does."""
        return self._storage.whole

    def models(self) -> list[str]:
        """Return the names of its models."""
        with self._errors_of("list models"):
            names = list(self._storage.models())
        for name in names:
            if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
                raise PluginError(f"{self} lists {name!r}, which cannot be the name of a model")
        return names

    def fingerprint(self, model: str) -> Fingerprint:
        """Return the present fingerprint of ``model``."""
        with self._errors_of(f"list the files of model '{model}'"):
            files = dict(self._storage.fingerprint(model))
        for path in files:
            parts = path.removesuffix("/").split("/")
            if "\0" in path or not {"", ".", ".."}.isdisjoint(parts):
                raise PluginError(f"{self} lists {path!r} of model '{model}', which is no path below its directory")
        return Fingerprint(self.url, files)

    def fetch(self, model: str, files: Collection[str]) -> LocalDirectory:
        """Return a directory of this machine with ``files`` of ``model``. The caller gives it back."""
        made: list[Path] = []

        def new_directory() -> Path:
            made.append(self.new_directory(model))
            return made[-1]

        try:
            with self._errors_of(f"fetch model '{model}'"):
                path = Path(self._storage.fetch(model, [f for f in files if not f.endswith("/")], new_directory))
            is_new = any(path.is_relative_to(each) for each in made)
            if is_new:
                for folder in files:
                    if folder.endswith("/"):
                        (path / folder).mkdir(parents=True, exist_ok=True)
                check_files(path, (), allow_external_links=False)
        except BaseException:
            for each in made:
                remove(each)
            raise
        own = None if is_new else path
        return LocalDirectory(path, partial(self._release, model, own, made), name=model if is_new else "")

    def size(self, model: str, files: Collection[str]) -> int:
        """Return the bytes of ``files`` of ``model``; 0 if that is not known."""
        with self._errors_of(f"read the size of model '{model}'"):
            return self._storage.size(model, files)

    def _release(self, model: str, own: Path | None, made: Collection[Path]) -> None:
        """Remove the directories ``made``, and give the storage's ``own`` directory back to it."""
        for path in made:
            remove(path)
        if own is not None:
            try:
                self._storage.release(model, own)
            except Exception:  # code of a plugin; the model is unloaded all the same
                log.exception("%s failed to take back '%s'", self, own)

    def new_directory(self, model: str) -> Path:
        """Return a new, empty, private directory. The caller removes it."""
        return self._directories.make(model)

    def close(self) -> None:
        """Close the storage."""
        try:
            self._storage.close()
        except Exception:  # code of a plugin; the others are still closed
            log.exception("%s failed to close", self)

    def _errors_of(self, what: str) -> AbstractContextManager[None]:
        return plugin_errors(f"{self} failed to {what}")

    def __str__(self) -> str:
        return f"storage '{self._storage.name}' of '{self.url}'"


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that was found. ``repositories`` has several elements if several have the model.

    ``config`` replaces its config file. If ``is_temporary``, the whole model is from a load request.
    """

    name: str
    repositories: tuple[Repository, ...]
    config: ModelConfig | None = None
    is_temporary: bool = False

    @property
    def is_sent(self) -> bool:
        """True if the config, or the whole model, is from a load request."""
        return self.config is not None or self.is_temporary

    @property
    def is_mapped(self) -> bool:
        """True if it is served under this name, whatever name its config has."""
        return self.name in self.repositories[0].mapped_names

    @property
    def is_duplicate(self) -> bool:
        return len(self.repositories) > 1

    @property
    def places(self) -> tuple[str, ...]:
        """Its locations, for messages."""
        return tuple(f"{repository.url.rstrip('/')}/{self.name}" for repository in self.repositories)

    def fingerprint(self) -> Fingerprint:
        """Return the present fingerprint. Blocks."""
        return self.repositories[0].fingerprint(self.name)

    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """Return the present fingerprint in each repository that has the model. Blocks."""
        return tuple(repository.fingerprint(self.name) for repository in self.repositories)

    def fetch(self, files: Collection[str]) -> LocalDirectory:
        """Return a directory of this machine with ``files``. The caller gives it back. Blocks."""
        return self.repositories[0].fetch(self.name, files)

    def size(self, files: Collection[str], versions: Collection[int]) -> int:
        """Return the size in bytes of the ``files`` of ``versions``; 0 if it is unknown. Blocks."""
        selected = [path for path in files if path.partition("/")[0] in map(str, versions) and not path.endswith("/")]
        return self.repositories[0].size(self.name, selected)

    def new_directory(self) -> Path:
        """Return a new, empty, private directory. The caller removes it. Blocks."""
        return self.repositories[0].new_directory(self.name)


class StorageClasses(Protocol):
    """A registry of classes. ``get`` raises `LoadError` with the reason."""

    def get(self, name: str) -> type[Storage]: ...


class Repositories:
    """All of ``--model-repository``. Methods block, and may be called on any thread.

    The first call creates the storages, and raises for a scheme that no plugin has.
    """

    def __init__(self, options: ServerOptions, classes: StorageClasses) -> None:
        self._options, self._classes = options, classes
        self._directories = TemporaryDirectories()
        self._opened: list[Repository] = []
        self._lock = threading.Lock()

    def scan(self) -> dict[str, Entry]:
        """Return all models, by name in sorted order. Raises `HeadraceError` for a repository that cannot be read."""
        entries: dict[str, tuple[Repository, ...]] = {}
        for repository in self._all():
            for name in repository.models():
                entries[name] = (*entries.get(name, ()), repository)
        return {name: Entry(name, repositories) for name, repositories in sorted(entries.items())}

    def find(self, name: str) -> Entry | None:
        """Return the model ``name``. Any string is safe: it is compared and never used as a path."""
        repositories = tuple(repository for repository in self._all() if name in repository.models())
        return Entry(name, repositories) if repositories else None

    def sent(self, name: str, overrides: Overrides) -> Entry:
        """Return a model whose files are all from a load request."""
        storage = SentFiles(name, overrides.files, self._options)
        return Entry(name, (Repository(storage, self._directories),), overrides.config, is_temporary=True)

    def add(self, url: str, names: Mapping[str, str]) -> None:
        """Register a repository: all its models, or those in ``names``, by the name under which they are served.

        Raises `AlreadyExists`, and `NotFound` if it cannot be read.
        """
        opened = self._all()
        if any(repository.url == url for repository in opened):
            raise AlreadyExists(f"model repository '{url}' has already been registered")
        repository = self._open(url, names)
        try:
            repository.models()
        except HeadraceError as error:
            repository.close()
            raise NotFound(f"failed to register '{url}', repository not found") from error
        used = [name for name in names if self.find(name) is not None]
        if used:
            repository.close()
            raise AlreadyExists(f"failed to register '{used[0]}', there is a conflicting mapping for '{used[0]}'")
        with self._lock:
            self._opened = [*self._opened, repository]

    def remove(self, url: str) -> frozenset[str]:
        """Forget a repository of `add`. Return the names under which it had models. Raises `NotFound`."""
        with self._lock:
            repositories = [repository for repository in self._opened if repository.url == url]
            if not repositories or url in self._options.model_repository:
                raise NotFound(f"failed to unregister '{url}', repository not found")
            self._opened = [repository for repository in self._opened if repository.url != url]
        repositories[0].close()
        return repositories[0].mapped_names

    def sweep(self) -> None:
        """Remove the directories of processes that were killed."""
        self._directories.sweep()

    def close(self) -> None:
        """Close the storages, and remove the directories that are left."""
        for repository in self._opened:
            repository.close()
        self._directories.close()

    def _all(self) -> list[Repository]:
        with self._lock:
            if not self._opened:
                self._opened = [self._open(url) for url in self._options.model_repository]
            return self._opened

    def _open(self, url: str, names: Mapping[str, str] | None = None) -> Repository:
        try:
            kind = self._class_of(scheme_of(url))
        except LoadError as error:
            raise ConfigError(f"repository '{url}' cannot be read: {error.message}") from error
        with plugin_errors(f"storage '{kind.name}' failed to open '{url}'"):
            url, names = split_name(url) if names is None else (url, names)
            storage = kind(url, self._options)
            return Repository(storage if names is None else MappedStorage(storage, names), self._directories)

    def _class_of(self, scheme: str) -> type[Storage]:
        """Return the storage of ``scheme``, or that of other schemes. Raises `LoadError` with the reason."""
        try:
            return self._classes.get(scheme)
        except LoadError as error:
            if error.code is Code.INVALID_ARGUMENT:  # else several plugins have it
                with suppress(LoadError):
                    return self._classes.get(_OTHERS)
            raise
