"""What a storage implements: it keeps models by name under a URL, and core does the rest.

Core lists the models, compares fingerprints, selects versions, and asks for the files of one version at a time. A
storage knows neither configs nor versions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from headrace.config.options import ServerOptions


class Storage(ABC):
    """The models of one repository: one object for each ``--model-repository`` whose URL has the scheme ``name``.

    All methods run on threads, several at once, and may block. They raise `HeadraceError` with a message for the
    operator; any other exception is reported as an error of the storage.
    """

    #: The URL scheme, in lower case: ``s3`` for ``s3://bucket/models``.
    name: ClassVar[str]

    def __init__(self, url: str, options: ServerOptions) -> None:
        """``url`` is what ``--model-repository`` says. Raise `ConfigError` if it cannot be right."""
        self.url = url
        self.options = options

    @abstractmethod
    def models(self) -> Collection[str]:
        """Return the names of the models. Raise if the repository cannot be read: an empty one has no models."""

    @abstractmethod
    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        """Return the files of ``model``, one of `models`: a tag for each path below the model's directory.

        The tag changes when the file changes: a time and a size, an ETag, a digest. Paths have the form
        ``1/model.onnx``. One that ends with ``/`` is a directory, needed only for an empty one. Called at every look
        of mode poll: do not read contents. A model that is gone has no files.
        """

    @abstractmethod
    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        """Return a directory on this machine that holds at least ``files``, paths of `fingerprint`, of ``model``.

        ``new_directory()`` returns a new, empty, private one, which core removes when the version is unloaded, when
        this method raises, and after the server was killed. A storage that has the files on this machine returns the
        directory in which they lie instead; it is read only, and given back by `give_back`.
        """

    def give_back(self, model: str, directory: Path) -> None:
        """Called when ``directory``, which `fetch` returned and did not get from ``new_directory``, is used no more."""

    def close(self) -> None:
        """Called when the server has stopped."""
