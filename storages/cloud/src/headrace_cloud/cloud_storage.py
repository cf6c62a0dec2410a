"""The storages: model repositories at URLs of a cloud."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import ConfigError, NotFound, ServerOptions, Storage, one_line
from headrace_cloud.cloud_options import CloudStorageOptions

if TYPE_CHECKING:
    from headrace_cloud.stored_objects import ObjectStore


class CloudStorage(Storage):
    """Models below a prefix: ``<prefix>/<model>/config.pbtxt`` and so on. The base of all storages of this plugin."""

    def __init__(self, url: str, options: ServerOptions) -> None:
        from headrace_cloud.file_cache import FileCache
        from headrace_cloud.model_download import ModelDownload
        from headrace_cloud.model_listing import Completeness, ModelListing

        super().__init__(url, options)
        own = options.group(CloudStorageOptions)
        self._closing = threading.Event()
        store = self.open_store(url, own)
        polls = options.model_control_mode == "poll"
        self._listing = ModelListing(store, Completeness(own.ready_file, own.settle_s if polls else 0.0))
        self._cache = FileCache(own.cache_path(self.name), own.cache_size_mb << 20, self._closing)
        self._download = ModelDownload(store, self._cache, own.parallel, self._closing)

    def open_store(self, url: str, options: CloudStorageOptions) -> ObjectStore:
        """Return the objects below ``url``. Raises `ConfigError`."""
        from headrace_cloud.clouds import CloudStore

        return CloudStore(url, options)

    def models(self) -> Collection[str]:
        return self._listing.models()

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return {path: (each.tag, each.size) for path, each in self._listing.files(model).items()}

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        known = self._listing.last(model)
        if not known.keys() >= set(files):
            known = self._listing.files(model)
        for path in files:
            if path not in known:
                raise NotFound(f"'{self.url.rstrip('/')}/{model}/{path}' does not exist")
        directory = new_directory()
        self._download.run(model, {path: known[path] for path in files}, directory)
        return directory

    def size(self, model: str, files: Collection[str]) -> int:
        known = self._listing.last(model)
        return sum(known[path].size for path in files if path in known)

    def close(self) -> None:
        self._closing.set()
        self._cache.close()


class S3Storage(CloudStorage):
    """``s3://bucket/prefix``."""

    name = "s3"


class GoogleStorage(CloudStorage):
    """``gs://bucket/prefix``."""

    name = "gs"


class AzureStorage(CloudStorage):
    """``as://account/container/prefix``."""

    name = "as"


class OtherStorage(CloudStorage):
    """Any other storage of fsspec, if ``--cloud-schemes`` has its scheme."""

    name = "*"

    def open_store(self, url: str, options: CloudStorageOptions) -> ObjectStore:
        from headrace_cloud.fsspec_store import FsspecStore

        scheme = url.partition("://")[0].lower()
        if scheme not in schemes():
            # The URL is not repeated: it may have a password.
            raise ConfigError(f"no plugin provides storage '{one_line(scheme)}', and fsspec does not read it")
        if scheme not in options.allowed_schemes:
            raise ConfigError(f"'{scheme}://' is not read unless --cloud-schemes={scheme} allows it")
        return FsspecStore(url, options)


def schemes() -> set[str]:
    """Return the schemes of fsspec, and of other drivers that are installed for it."""
    from headrace_cloud.fsspec_store import SCHEMES

    return {*SCHEMES, *(each.name.lower() for each in entry_points(group="fsspec.specs"))}
