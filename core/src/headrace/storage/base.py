"""The interface of a storage: it keeps models by name under a URL.

Core lists the models, compares fingerprints, selects versions, and fetches the files of one version at a time. A
storage has no knowledge of configs and versions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from headrace.config.options import ServerOptions


class Storage(ABC):
    """The models of one repository: one object per ``--model-repository`` whose URL has the scheme ``name``.

    All methods run on threads, several at once, and may block. They raise `HeadraceError` with a message for the
    operator. Any other exception is reported as an error of the storage.
    """

    #: The URL scheme, in lower case: ``s3`` for ``s3://bucket/models``. ``*``: each scheme that no storage has.
    name: ClassVar[str]
    #: True if each directory that `fetch` returns has all files of the model, and `release` does nothing. Then core
    #: calls `fetch` once per load, and not for each version, too.
    whole: ClassVar[bool] = False

    def __init__(self, url: str, options: ServerOptions) -> None:
        """Create the storage of ``url``, the value of ``--model-repository``. Raise `ConfigError` if it is invalid."""
        self.url = url
        self.options = options

    @abstractmethod
    def models(self) -> Collection[str]:
        """Return the names of the models. Raise if the repository cannot be read: an empty one has no models."""

    @abstractmethod
    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        """Return the files of ``model``, one of `models`: a tag for each path below the model's directory.

        The tag changes when the file changes: a time and a size, an ETag, a digest. Paths have the form
        ``1/model.onnx``. A path that ends with ``/`` is a directory, needed only for an empty one. Mode poll calls this
        at every poll: do not read contents. A model that was removed has no files.
        """

    @abstractmethod
    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        """Return a directory on this machine with at least ``files`` of ``model``, which are paths of `fingerprint`.

        ``new_directory()`` returns a new, empty, private directory. Core removes it when the version is unloaded, when
        this method raises, or, after the server was killed, at the next start. A storage with its files on this machine
        returns their own directory instead. Core only reads it, and calls `release`.
        """

    def size(self, model: str, files: Collection[str]) -> int:
        """Return the bytes of ``files`` of ``model``; 0 if that is not known without a fetch."""
        return 0

    def release(self, model: str, directory: Path) -> None:
        """Called when ``directory`` is no longer used, if `fetch` did not get it from ``new_directory``."""

    def close(self) -> None:
        """Called when the server has stopped."""
