"""What requests and responses carry beside tensors: flags, parameters, preferred memory, and the trace.

Names and numbers are Triton's.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, TypeAlias

from triton_python_backend_utils.arguments import INT64, choice, whole_number
from triton_python_backend_utils.error import TritonModelException

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1
TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2

Parameter: TypeAlias = "str | int | bool | float"


def checked(parameters: Mapping[str, Parameter] | None) -> dict[str, Parameter]:
    """A copy of ``parameters``, empty for None. Raises `TritonModelException` for what cannot be sent."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to have type dict, found type {type(parameters)}")
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


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


class InferenceTrace:
    """Which trace a request belongs to; hand it on to the requests that a model makes."""

    __slots__ = ("_context",)

    def __init__(self) -> None:
        self._context: str | None = None

    def get_context(self) -> str | None:
        """The context of OpenTelemetry as text, None if the request is not traced by it."""
        return self._context
