"""Where a model would like the outputs of another model to be."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from triton_python_backend_utils.arguments import INT64, choice, whole_number


class MemoryType(IntEnum):
    """Triton's Python backend numbers them so, not as the server's own C API."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU: Final = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU: Final = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory:
    """Kind of memory and device of the outputs of a request. Accepted: outputs arrive in memory of the host."""

    __slots__ = ("_device_id", "_type")

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self._type = choice(preferred_memory_type, MemoryType, "preferred_memory_type")
        self._device_id = whole_number(preferred_device_id, "preferred_device_id", INT64)

    def __repr__(self) -> str:
        return f"PreferredMemory({self._type.name}, {self._device_id})"
