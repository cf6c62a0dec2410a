"""The functions of the CUDA driver's API that an instance needs, by ctypes: memory, streams, events, captured graphs.

Only the driver's own library is needed: no CUDA toolkit, no further package. TensorRT uses the same device by the
runtime API, which shares the device's primary context. Prototypes are those of ``cuda.h``. A call that waits releases
the interpreter's lock.
"""

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

#: The parameters of the functions, from ``cuda.h``. Each returns a ``CUresult``.
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

#: Calls that only start work, and hold the interpreter's lock. To release and reacquire it six times per execution took
#: 540 us beside a busy thread; the calls take 2 us.
_BRIEF: Final = frozenset({
    "cuCtxSetCurrent", "cuEventRecord", "cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
})  # fmt: skip


class CudaDriver:
    """The driver's library. Get it from `cuda_driver`."""

    def __init__(self, path: str) -> None:
        """Raises `OSError` without the library at ``path``, and `AttributeError` if it is too old."""
        self._blocking = {name: _prototyped(ctypes.CDLL(path), name) for name in PROTOTYPES}
        self._functions = self._blocking | {name: _prototyped(ctypes.PyDLL(path), name) for name in _BRIEF}
        self.call("cuInit", 0)

    def status(self, name: str, *arguments: Any) -> int:
        """Call the function ``name``. Return its result, 0 for success."""
        result: int = self._functions[name](*arguments)
        return result

    def blocking_status(self, name: str, *arguments: Any) -> int:
        """Do as `status`, but release the interpreter's lock: for a call of `_BRIEF` that may wait here."""
        result: int = self._blocking[name](*arguments)
        return result

    def call(self, name: str, *arguments: Any) -> None:
        """Call the function ``name``. Raises `BackendError` (internal) with the driver's text."""
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
    """Return the CUDA driver. Raises `LoadError` naming the missing part."""
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
