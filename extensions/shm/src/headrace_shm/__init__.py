"""Triton's extensions for shared memory: inputs and outputs in memory that client and server share.

System regions are parts of POSIX segments, CUDA regions are memory of a GPU. Source: docs/spec/behaviours.md section
12.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace import Addition, Engine, Extension, hookimpl
from headrace_shm.region_location import RegionLocation
from headrace_shm.region_methods import (
    CudaRegisterMethod,
    CudaStatusMethod,
    CudaUnregisterMethod,
    SystemRegisterMethod,
    SystemStatusMethod,
    SystemUnregisterMethod,
)
from headrace_shm.region_routes import (
    CudaRegister,
    CudaStatus,
    CudaUnregister,
    SystemRegister,
    SystemStatus,
    SystemUnregister,
)
from headrace_shm.registration import RegionExtension, ShmOptions

__all__ = ["SharedMemory", "ShmOptions"]

_ROUTES: tuple[type[Addition], ...] = (
    *(SystemStatus, SystemRegister, SystemUnregister, CudaStatus, CudaRegister, CudaUnregister),
    *(SystemStatusMethod, SystemRegisterMethod, SystemUnregisterMethod),
    *(CudaStatusMethod, CudaRegisterMethod, CudaUnregisterMethod),
)


class SharedMemory(RegionExtension):
    """The extension ``shm``."""

    adds: ClassVar[Sequence[type[Addition]]] = (*_ROUTES, RegionLocation)

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        if not self.is_allowed:
            # Requests are not searched for regions, of which there are none.
            self.adds = _ROUTES  # type: ignore[misc]  # of this object


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [SharedMemory]
