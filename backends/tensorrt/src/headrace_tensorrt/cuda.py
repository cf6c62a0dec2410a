"""One GPU by the CUDA driver's API: its memory, pinned memory of the host, streams, and captured graphs.

Addresses and handles are plain integers, as TensorRT takes them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import BackendError, Code, LoadError
from headrace_tensorrt.cuda_driver import ADDRESS, HANDLE, INT, cuda_driver

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the legacy default stream
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2  # CU_EVENT_*
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: the limits of a capture do not apply to other threads
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every device
#: Errors of memory or of a kernel, after which every call fails until the process exits.
_LASTING = frozenset({214, 220, 700, 702, 709, 710, *range(714, 720)})


class CudaDevice:
    """One GPU: the primary context of this process on it, and ``pinned``, memory of the host for copies.

    Get it from `cuda_device`. Any thread that has called `enter` may call its methods. ``failure`` is the reason why
    this process can no longer use the device; empty if it can.
    """

    def __init__(self, ordinal: int) -> None:
        """Raises `LoadError` if there is no such GPU."""
        self.driver, self.ordinal, self.failure = cuda_driver(), ordinal, ""
        count = self.driver.count_gpus()
        if not 0 <= ordinal < count:
            raise LoadError(f"there is no GPU {ordinal}: the CUDA driver knows {count}")
        device, context = INT(), HANDLE()
        self.driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device.value
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._context, self.pinned = context, PinnedPool(self)
        self.enter()

    @property
    def compute_capability(self) -> str:
        """The key of ``cc_model_filenames``, for example ``9.0``."""
        parts = []
        for attribute in (_MAJOR, _MINOR):
            value = INT()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
            parts.append(str(value.value))
        return ".".join(parts)

    def enter(self) -> None:
        """Make this the device of the calling thread."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver. Raises `BackendError` (internal) with the GPU and the driver's text."""
        if result := self.driver.status(name, *arguments):
            raise BackendError(self.note(name, result), Code.INTERNAL)

    def note(self, name: str, result: int) -> str:
        """Return why ``name`` failed. Store it in ``failure`` if the device has become unusable."""
        reason = f"GPU {self.ordinal}: {name} failed: {self.driver.explain(result)}"
        if result in _LASTING:
            self.failure = self.failure or reason
        return reason

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new device memory, aligned to 256 bytes. Raises `BackendError`, with the size."""
        address = ADDRESS()
        try:
            self.call("cuMemAlloc_v2", ctypes.byref(address), max(1, size_bytes))
        except BackendError as error:
            raise BackendError(f"{error.message}, for {size_bytes} bytes", Code.INTERNAL) from error
        return address.value or 0

    def free(self, address: int) -> None:
        if address:
            self.driver.status("cuMemFree_v2", address)


class CudaStream:
    """A stream of ``device``, and the event by which a thread waits for it.

    ``priority`` is -1 for the device's highest, 1 for its lowest and 0 for its default. A thread that waits sleeps, or
    polls if ``spins``.
    """

    def __init__(self, device: CudaDevice, priority: int = 0, spins: bool = False) -> None:
        self.device = device
        lowest, highest, handle, event = INT(), INT(), HANDLE(), HANDLE()
        device.call("cuCtxGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest))
        level = {1: lowest.value, 0: 0, -1: highest.value}[priority]
        device.call("cuStreamCreateWithPriority", ctypes.byref(handle), _NON_BLOCKING, level)
        self._stream, self.priority = handle, level
        device.call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING | (0 if spins else _BLOCKING_SYNC))
        self._event = event

    @property
    def handle(self) -> int:
        """The stream, for TensorRT."""
        return self._stream.value or 0

    def copy_in(self, address: int, source: int, size_bytes: int, is_pinned: bool) -> None:
        """Start a copy from host memory, which must not change meanwhile. Waits if it is not pinned."""
        self._copy(is_pinned, "cuMemcpyHtoDAsync_v2", address, source, size_bytes)

    def copy_out(self, target: int, address: int, size_bytes: int, is_pinned: bool) -> None:
        """Start a copy from the device to host memory at ``target``. Waits if it is not pinned."""
        self._copy(is_pinned, "cuMemcpyDtoHAsync_v2", target, address, size_bytes)

    def _copy(self, is_pinned: bool, name: str, target: int, source: int, size_bytes: int) -> None:
        driver = self.device.driver
        copy = driver.status if is_pinned else driver.blocking_status
        if result := copy(name, target, source, size_bytes, self._stream):
            raise BackendError(self.device.note(name, result), Code.INTERNAL)

    def clear(self, address: int, size_bytes: int) -> None:
        """Start filling device memory with zeros."""
        self.device.call("cuMemsetD8Async", address, 0, size_bytes, self._stream)

    def wait(self) -> None:
        """Wait for all work on the stream. Raises `BackendError` if some of it failed."""
        self.device.call("cuEventRecord", self._event, self._stream)
        self.device.call("cuEventSynchronize", self._event)

    def drain(self) -> None:
        """Wait for all work on the stream, failed or not. `CudaDevice.failure` may have the error."""
        if result := self.device.driver.status("cuStreamSynchronize", self._stream):
            self.device.note("cuStreamSynchronize", result)

    def begin_capture(self) -> None:
        """Record the following work instead of executing it."""
        self.device.call("cuStreamBeginCapture_v2", self._stream, _THREAD_LOCAL)

    def end_capture(self) -> int:
        """Return the graph recorded since `begin_capture`, for `launch` and `destroy_graph`."""
        graph, ready = HANDLE(), HANDLE()
        self.device.call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            self.device.call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, 0)
        finally:
            self.device.driver.status("cuGraphDestroy", graph)
        return ready.value or 0

    def abandon_capture(self) -> None:
        """End a failed capture."""
        graph = HANDLE()
        self.device.driver.status("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        if graph.value:
            self.device.driver.status("cuGraphDestroy", graph)

    def launch(self, captured: int) -> None:
        self.device.call("cuGraphLaunch", captured, self._stream)

    def destroy_graph(self, captured: int) -> None:
        self.device.driver.status("cuGraphExecDestroy", captured)

    def close(self) -> None:
        """Wait for the work on the stream, and release the stream."""
        self.drain()
        self.device.driver.status("cuEventDestroy_v2", self._event)
        self.device.driver.status("cuStreamDestroy_v2", self._stream)


class PinnedPool:
    """Page-locked host memory, which the device reads and writes without the CPU.

    A block returns to the pool when the last view of its array is released, on any thread.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        #: The addresses of free blocks, by size. Without a lock, because a finalizer may run at any point.
        self._idle: dict[int, deque[int]] = {}

    def take(self, size_bytes: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Return an uninitialised u8[size_bytes] and its address. Raises `BackendError`."""
        size = 1 << max(8, (size_bytes - 1).bit_length())
        idle = self._idle.get(size)
        if idle is None:
            idle = self._idle.setdefault(size, deque())
        try:
            address = idle.pop()
        except IndexError:
            address = self._make(size)
        block = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(block, idle.append, address).atexit = False
        return np.frombuffer(memoryview(block), np.uint8, size_bytes), address

    def _make(self, size: int) -> int:
        pointer = HANDLE()
        self._device.call("cuMemHostAlloc", ctypes.byref(pointer), size, _PORTABLE)
        return pointer.value or 0

    def trim(self) -> None:
        """Free unused blocks. On a thread that has entered the device."""
        for idle in tuple(self._idle.values()):
            while idle:
                self._device.driver.status("cuMemFreeHost", idle.pop())


_devices: dict[int, CudaDevice] = {}
_opening = Lock()


def cuda_device(ordinal: int) -> CudaDevice:
    """Return the GPU ``ordinal`` of this process; raises `LoadError` if there is none. Any thread.

    It is never released: a response in pinned memory may be sent after its model was unloaded.
    """
    with _opening:
        if ordinal not in _devices:
            _devices[ordinal] = CudaDevice(ordinal)
        return _devices[ordinal]
