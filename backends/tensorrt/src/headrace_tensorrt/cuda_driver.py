"""The CUDA driver's API, as much of it as an instance needs, by ctypes: memory, streams, events, captured graphs.

The driver's library comes with the driver and is all that there must be: no CUDA toolkit, no further package. TensorRT
works on the same device through the runtime API, which shares the device's primary context with it. Prototypes are
those of ``cuda.h``; while a call waits, other threads run."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from headrace import BackendError, Code, LoadError

_LIBRARY: Final = "libcuda.so.1"
INT, _UINT, _SIZE, ADDRESS = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64
HANDLE = ctypes.c_void_p
_INTO_INT, _INTO_HANDLE, _INTO_ADDRESS = ctypes.POINTER(INT), ctypes.POINTER(HANDLE), ctypes.POINTER(ADDRESS)
_INTO_TEXT = ctypes.POINTER(ctypes.c_char_p)

#: The functions used and their parameters, as ``cuda.h`` has them; each returns a ``CUresult``.
PROTOTYPES: Final[Mapping[str, tuple[Any, ...]]] = {
    "cuInit": (_UINT,),
    "cuDeviceGetCount": (_INTO_INT,),
    "cuDeviceGet": (_INTO_INT, INT),
    "cuDeviceGetAttribute": (_INTO_INT, INT, INT),
    "cuDevicePrimaryCtxRetain": (_INTO_HANDLE, INT),
    "cuCtxSetCurrent": (HANDLE,),
    "cuCtxGetStreamPriorityRange": (_INTO_INT, _INTO_INT),
    "cuStreamCreateWithPriority": (_INTO_HANDLE, _UINT, INT),
    "cuStreamSynchronize": (HANDLE,),
    "cuStreamDestroy_v2": (HANDLE,),
    "cuStreamBeginCapture_v2": (HANDLE, INT),
    "cuStreamEndCapture": (HANDLE, _INTO_HANDLE),
    "cuGraphInstantiateWithFlags": (_INTO_HANDLE, HANDLE, ctypes.c_ulonglong),
    "cuGraphLaunch": (HANDLE, HANDLE),
    "cuGraphExecDestroy": (HANDLE,),
    "cuGraphDestroy": (HANDLE,),
    "cuEventCreate": (_INTO_HANDLE, _UINT),
    "cuEventRecord": (HANDLE, HANDLE),
    "cuEventSynchronize": (HANDLE,),
    "cuEventDestroy_v2": (HANDLE,),
    "cuMemAlloc_v2": (_INTO_ADDRESS, _SIZE),
    "cuMemFree_v2": (ADDRESS,),
    "cuMemHostAlloc": (_INTO_HANDLE, _SIZE, _UINT),
    "cuMemFreeHost": (HANDLE,),
    "cuMemcpyHtoDAsync_v2": (ADDRESS, HANDLE, _SIZE, HANDLE),
    "cuMemcpyDtoHAsync_v2": (HANDLE, ADDRESS, _SIZE, HANDLE),
    "cuMemsetD8Async": (ADDRESS, ctypes.c_ubyte, _SIZE, HANDLE),
    "cuGetErrorName": (INT, _INTO_TEXT),
    "cuGetErrorString": (INT, _INTO_TEXT),
}

#: Calls that only begin something keep the interpreter's lock. To release and reacquire it six times per execution took
#: 540 us beside a busy thread; the calls take 2.
_BRIEF: Final = frozenset({
    "cuCtxSetCurrent", "cuEventRecord", "cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
})  # fmt: skip


class CudaDriver:
    """The driver's library. `cuda_driver` gives the one of this process."""

    def __init__(self, path: str) -> None:
        """Raises `OSError` without the library at ``path``, and `AttributeError` if it is too old."""
        self._patient = {name: _prototyped(ctypes.CDLL(path), name) for name in PROTOTYPES}
        self._functions = self._patient | {name: _prototyped(ctypes.PyDLL(path), name) for name in _BRIEF}
        self.call("cuInit", 0)

    def status(self, name: str, *arguments: Any) -> int:
        """Call the function ``name``. Return its result, 0 for success."""
        result: int = self._functions[name](*arguments)
        return result

    def patient_status(self, name: str, *arguments: Any) -> int:
        """Do as `status`, for a usually brief call that may wait here."""
        result: int = self._patient[name](*arguments)
        return result

    def call(self, name: str, *arguments: Any) -> None:
        """Call the function ``name``; raises `BackendError` (internal) in the driver's words."""
        if result := self._functions[name](*arguments):
            raise BackendError(f"{name} failed: {self.explain(result)}", Code.INTERNAL)

    def count_gpus(self) -> int:
        count = INT()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def explain(self, result: int) -> str:
        """Return the text of a status: ``out of memory (CUDA_ERROR_OUT_OF_MEMORY)`` for 2."""
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._functions["cuGetErrorName"](result, ctypes.byref(name))
        self._functions["cuGetErrorString"](result, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode()} ({(name.value or str(result).encode()).decode()})"


def _prototyped(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = PROTOTYPES[name], INT
    return function


@cache
def cuda_driver() -> CudaDriver:
    """Return the CUDA driver; raises `LoadError` saying what is missing."""
    try:
        return CudaDriver(_LIBRARY)
    except OSError as error:
        raise LoadError(
            f"backend 'tensorrt' runs on NVIDIA GPUs only, and this machine has no CUDA driver ({error})"
        ) from error
    except AttributeError as error:
        raise LoadError(f"backend 'tensorrt' needs a CUDA driver of 12.0 or later ({error})") from error
    except BackendError as error:
        raise LoadError(f"the CUDA driver cannot be used: {error.message}") from error
