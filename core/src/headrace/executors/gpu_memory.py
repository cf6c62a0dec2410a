"""The used memory of GPUs, for ``--model-load-gpu-limit``: a load on a GPU above its limit is refused.

NVML gives the figures and needs no GPU memory itself. It numbers GPUs by their place on the bus; CUDA numbers them by
``CUDA_VISIBLE_DEVICES``. Both have the bus address, which maps one number to the other. Source: docs/spec/behaviours.md
sections 8 and 14.
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
    """Return the used share of the memory of ``gpu``, 0 to 1, by all processes. Raises `OSError` if it is unknown."""
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
    """Raise `Unavailable`, in Triton's words, for the first of ``placements`` on a GPU above its limit.

    Also raises if the used memory of such a GPU is unknown.
    """
    for placement in placements:
        limit = limits.get(placement.device.id) if placement.device.kind == "gpu" else None
        if limit is None:
            continue
        gpu = placement.device.id
        try:
            part = used(gpu)
        except (OSError, AttributeError) as error:
            raise Unavailable(
                f"can not create model '{placement.name}': a memory limit is set for GPU {gpu}, but its used "
                f"memory is unknown: {error}"
            ) from error
        if part > limit:
            raise Unavailable(
                f"can not create model '{placement.name}': memory limit set for GPU {gpu} has exceeded, model loading "
                "is rejected."
            )
