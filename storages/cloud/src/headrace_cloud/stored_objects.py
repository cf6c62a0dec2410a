"""The interface for reading a repository: a listing of objects, and ranges of their bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace import LoadError

#: Larger objects are read in parts of this size.
PART_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class StoredObject:
    """``path`` is below the repository's prefix. ``tag`` changes with the content, for example an ETag.

    ``modified_s`` is its time by the server's clock, in seconds since 1970; 0 if unknown. A path that
    ends with ``/`` is a folder.
    """

    path: str
    size: int
    tag: str
    modified_s: float = 0.0


class InvalidKey(LoadError):
    """A key below the listed folder cannot be the path of a file, so that the folder cannot be listed."""


class ObjectChanged(LoadError):
    """An object is not the one of the listing any more."""


class NoRanges(LoadError):
    """The server has answered a request for a part of an object with the whole one."""


class ObjectStore(ABC):
    """The objects below one URL. Any thread. Methods block, for a bounded time, and raise `HeadraceError`."""

    #: Names the server, the bucket and the prefix, in the names of cache entries.
    identity: str

    @abstractmethod
    def objects(self, folder: str = "") -> Iterator[StoredObject]:
        """Yield all objects below ``folder``, at any depth, in any order. Raises `InvalidKey`."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the folders at the top."""

    @abstractmethod
    def exists(self, each: StoredObject) -> bool:
        """True if there is an object of this path now."""

    @abstractmethod
    def read(self, each: StoredObject, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to before ``end``.

        Raises `ObjectChanged` if the object has changed. Raises `NoRanges`, if not all bytes are asked for.
        """

    @abstractmethod
    def read_many(self, objects: Sequence[StoredObject]) -> Iterator[tuple[StoredObject, memoryview]]:
        """Yield each of ``objects``, which are small, with its bytes, in any order. Raises `ObjectChanged`."""

    @abstractmethod
    def stream(self, each: StoredObject) -> Iterator[memoryview]:
        """Yield all bytes in order, by one request. Raises `ObjectChanged` if the object has changed."""
