"""System regions: parts of POSIX segments, and checks of requested mappings."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from headrace import Code, FileTooSmall, HeadraceError, InvalidArgument, PermissionDenied, Spec
from headrace_shm.segment_mapping import SegmentMapping

#: Segments of Triton's Python models, and POSIX semaphores, which are in the same directory.
_RESERVED = ("triton_python_backend_shm_region_", "sem.")


class SystemMemory(SegmentMapping):
    """The memory of the system region ``name``. It owns the views: models read and the server writes the segment."""

    is_copied: ClassVar[bool] = False

    def __init__(self, name: str, key: str, offset: int, size: int) -> None:
        super().__init__(key, offset, size)
        self._name = name

    def check(self) -> None:
        if self.is_lost:
            raise InvalidArgument(
                f"shared memory region '{self._name}' is lost, because its segment was shrunk, or there was no memory "
                "for it: unregister it, and register it again"
            )

    def finish(self, memory: memoryview, written: int) -> None:
        if memory:
            memory[-1]  # an access: the region is lost if the segment ends before
        self.check()

    def read(self, offset: int, size: int) -> memoryview:
        view = self.memory[offset : offset + size]
        self.finish(view, 0)
        return view

    target = read

    def tensor(self, offset: int, size: int, spec: Spec) -> None:
        """Return None: the memory is the host's."""

    def copy(self, offset: int, size: int) -> memoryview:
        copied = np.array(np.asarray(self)[offset : offset + size])
        self.check()
        return copied.data


def register_segment(name: str, key: str, offset: int, size: int, prefix: str) -> SystemMemory:
    """Return the memory of the region ``name``: ``size`` bytes from ``offset`` of the segment ``key``. Raises
    `HeadraceError`, for a key that does not begin with ``prefix``, too."""
    plain = key.lstrip("/")
    refused = f"cannot register shared memory region '{name}' - "
    if not plain:
        raise InvalidArgument(f"{refused}invalid shm key '{key}'")
    for reserved in _RESERVED:
        if plain.startswith(reserved):
            raise InvalidArgument(f"{refused}the key '{key}' contains the reserved prefix '{reserved}'")
    if not plain.startswith(prefix.lstrip("/")):
        raise PermissionDenied(f"{refused}the key '{key}' does not begin with '{prefix}', as --shm-key-prefix demands")
    if not size:
        raise InvalidArgument(
            f"failed to register shared memory region '{name}': unable to process address spaceInvalid argument"
        )
    try:
        return SystemMemory(name, plain, offset, size)
    except FileTooSmall:
        raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args") from None
    except (OSError, ValueError):
        raise _unopened(key) from None


def _unopened(key: str) -> HeadraceError:
    return InvalidArgument(f"Unable to open shared memory region: '{key}'", Code.INTERNAL)
