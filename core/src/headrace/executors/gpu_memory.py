"""How full the GPUs are, for ``--model-load-gpu-limit``: a load on one that is too full already is refused.

Source: docs/spec/behaviours.md sections 8 and 14. NVML is asked, which takes no memory of a GPU itself. It counts GPUs
by their places on the bus, CUDA as ``CUDA_VISIBLE_DEVICES`` has it: the bus address, which both know, tells which is
which.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping

from headrace.errors import Unavailable
from headrace.executors.devices import Placement

_ADDRESS_BYTES = 32


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used_part(gpu: int) -> float:
    """How much of the memory of ``gpu`` is in use, by whomever: 0 to 1. Raises `OSError` if nothing tells it."""
    cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
    device, address = ctypes.c_int(), ctypes.create_string_buffer(_ADDRESS_BYTES)
    _call(cuda.cuInit, ctypes.c_uint(0))
    _call(cuda.cuDeviceGet, ctypes.byref(device), ctypes.c_int(gpu))
    _call(cuda.cuDeviceGetPCIBusId, address, ctypes.c_int(_ADDRESS_BYTES), device)
    _call(nvml.nvmlInit_v2)
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        _call(nvml.nvmlDeviceGetHandleByPciBusId_v2, address, ctypes.byref(handle))
        _call(nvml.nvmlDeviceGetMemoryInfo, handle, ctypes.byref(memory))
    finally:
        nvml.nvmlShutdown()
    return float(memory.used / max(1, memory.total))


def _call(function: Callable[..., int], *arguments: object) -> None:
    if result := function(*arguments):
        raise OSError(f"{getattr(function, '__name__', function)} failed with {result}")


def refuse_beyond(
    limits: Mapping[int, float], placements: Iterable[Placement], used: Callable[[int], float] = used_part
) -> None:
    """Raise `Unavailable`, in Triton's words, for the first of ``placements`` on a GPU that is fuller than ``limits``
    allow; also where it cannot be told how full that is."""
    for placement in placements:
        limit = limits.get(placement.device.id) if placement.device.kind == "gpu" else None
        if limit is None:
            continue
        gpu = placement.device.id
        try:
            part = used(gpu)
        except (OSError, AttributeError) as error:
            raise Unavailable(
                f"can not create model '{placement.name}': a memory limit is set for GPU {gpu}, and it cannot be told "
                f"how full that is: {error}"
            ) from error
        if part > limit:
            raise Unavailable(
                f"can not create model '{placement.name}': memory limit set for GPU {gpu} has exceeded, model loading "
                "is rejected."
            )
