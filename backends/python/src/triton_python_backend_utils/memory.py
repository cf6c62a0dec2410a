"""Where a model would like the outputs of another model to be."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class MemoryType(IntEnum):
    """Source: TRITONSERVER_MemoryType, as Triton's Python backend numbers it."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_CPU_PINNED = 1
    TRITONSERVER_MEMORY_GPU = 2


TRITONSERVER_MEMORY_CPU: Final = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU: Final = MemoryType.TRITONSERVER_MEMORY_GPU


class PreferredMemory:
    """``preferred_memory_type`` and device of the outputs of a BLS request.

    Accepted for Triton's sake: outputs arrive in host memory.
    """

    __slots__ = ("_device_id", "_type")

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self._type = MemoryType(preferred_memory_type)
        self._device_id = preferred_device_id

    def __repr__(self) -> str:
        return f"PreferredMemory({self._type.name}, {self._device_id})"
