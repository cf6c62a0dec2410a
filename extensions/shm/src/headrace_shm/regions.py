"""The regions of one server by their names: registered, listed, found for a request, unregistered.

Source: docs/spec/behaviours.md section 12.3. System and CUDA regions share the names.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from headrace import AlreadyExists, DeviceTensor, InvalidArgument, NotFound, ResourceExhausted, Spec

Kind: TypeAlias = Literal["system", "cuda"]

_WORDS: Mapping[Kind, str] = {"system": "system", "cuda": "CUDA"}
#: The maximum bytes of all regions. More could exhaust the server's address space.
_TOTAL_BYTES = 1 << 42
#: The longest name.
_NAME_LENGTH = 1024


class RegionOwner(Protocol):
    """The ``base`` of the array that is the ``obj`` of a view. Any thread."""

    def finish(self, memory: memoryview, written: int) -> None:
        """Bring the first ``written`` bytes of the view to the client. Raises `HeadraceError` if they are lost."""


class Memory(Protocol):
    """The memory of one region. It exists as long as this object or a view of it. Any thread."""

    #: True if `read` copies, too.
    is_copied: ClassVar[bool]

    def check(self) -> None:
        """Raise `HeadraceError` if the memory is lost."""

    def read(self, offset: int, size: int) -> memoryview:
        """Return bytes that a model reads: those of an `RegionOwner`, or a copy, whose array has no ``base``."""

    def copy(self, offset: int, size: int) -> memoryview:
        """Return bytes that the client can not change."""

    def target(self, offset: int, size: int) -> memoryview:
        """Return memory for an output, of an `RegionOwner`."""

    def tensor(self, offset: int, size: int, spec: Spec) -> DeviceTensor | None:
        """Return the input ``spec`` on its device. None if it must be read by `read` or `copy`."""


class Region(NamedTuple):
    """One region. ``status`` is its description for clients."""

    kind: Kind
    name: str
    size: int
    status: Mapping[str, Any]
    #: None if it is unregistered, but still in use.
    memory: Memory | None


class Regions:
    """All regions. Event loop only, except `find`, which any thread may call."""

    def __init__(self, limit: int) -> None:
        """Allow at most ``limit`` regions at once."""
        self._limit = limit
        self._known: dict[str, Region] = {}
        #: Regions that were unregistered while requests used them, and their memory as long as it is used.
        self._leaving: dict[str, tuple[Region, weakref.ref[Memory]]] = {}

    def listed(self, kind: Kind, name: str = "") -> list[Region]:
        """Return the regions of ``kind``, or the one with ``name``, in the order of their names. Raises `NotFound`."""
        known = self._all()
        if not name:
            return sorted((region for region in known.values() if region.kind == kind), key=lambda each: each.name)
        region = known.get(name)
        if region is None:
            raise NotFound(f"Unable to find {kind} shared memory region: '{name}'")
        if region.kind != kind:
            raise NotFound(
                f"The region named '{name}' is registered as {_WORDS[region.kind]} shared memory, not {_WORDS[kind]} "
                "shared memory"
            )
        return [region]

    def check(self, name: str) -> None:
        """Raise if no region ``name`` can be registered."""
        known = self._all()
        if name in known:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if len(name) > _NAME_LENGTH:
            raise InvalidArgument(
                f"the name of a shared memory region has {len(name)} characters; at most {_NAME_LENGTH} are allowed"
            )
        if len(known) >= self._limit:
            raise ResourceExhausted(
                f"failed to register shared memory region '{name}': there are {self._limit} regions already, which is "
                "the value of --shm-max-regions"
            )

    def add(self, region: Region) -> None:
        """Register ``region``, whose name `check` has accepted. Raises if it is too large."""
        total = region.size + sum(each.size for each in self._all().values())
        if total > _TOTAL_BYTES:
            raise ResourceExhausted(
                f"failed to register shared memory region '{region.name}': all regions together would have {total} "
                f"bytes; at most {_TOTAL_BYTES} are allowed"
            )
        self._known[region.name] = region

    def remove(self, kind: Kind, name: str) -> None:
        """Unregister the region ``name`` of ``kind``. Nothing happens if there is none."""
        if name in self._known and self._known[name].kind == kind:
            self._unregister(name)

    def clear(self) -> None:
        """Unregister all regions."""
        for name in list(self._known):
            self._unregister(name)

    def _unregister(self, name: str) -> None:
        region = self._known.pop(name)
        memory = None if region.memory is None else weakref.ref(region.memory)
        left = region._replace(memory=None)
        del region  # and with it the memory, unless a request has a view of it
        if memory is not None and memory() is not None:
            self._leaving[name] = (left, memory)

    def _all(self) -> dict[str, Region]:
        """Return the regions that are registered or still used, by name."""
        self._leaving = {name: each for name, each in self._leaving.items() if each[1]() is not None}
        return {**self._known, **{name: region for name, (region, _) in self._leaving.items()}}

    def find(self, parameters: Mapping[str, Any]) -> tuple[Memory, int, int]:
        """Return the memory that ``parameters`` of an input or an output name, with offset and size in bytes.

        Raises `NotFound` for an unknown region and `InvalidArgument` for bytes that are not in it.
        """
        name = parameters["shared_memory_region"]
        region = self._known.get(name)
        if region is None or region.memory is None:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        offset, size = parameters.get("shared_memory_offset", 0), parameters.get("shared_memory_byte_size", 0)
        if not 0 <= offset < region.size:  # gRPC carries signed integers
            raise InvalidArgument(f"Invalid offset for shared memory region: '{name}'")
        if not 0 <= size <= region.size - offset or not offset + size:  # Triton computes the last byte
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{name}'")
        region.memory.check()
        return region.memory, offset, size
