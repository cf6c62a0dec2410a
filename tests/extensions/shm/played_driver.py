"""A CUDA driver that memory of the host plays, for tests without a GPU."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from headrace_engines import CudaLibrary


class PlayedDriver(CudaLibrary):
    """A device with one allocation, of 8192 bytes, that is memory of the host. Notes what is copied, and the end."""

    kind = 1  # of the host, in DLPack's numbers: NumPy reads it

    def __init__(self) -> None:
        self.memory = np.zeros(8192, np.uint8)
        self.done: list[str] = []
        self.closed = threading.Event()

    def use(self, device: int) -> None:
        assert device == 0

    def open(self, handle: bytes) -> int:
        return self.memory.ctypes.data

    def close(self, address: int) -> None:
        self.done.append("close")
        self.closed.set()

    def size(self, address: int) -> int:
        return 8192

    def read(self, target: int, address: int, size: int) -> None:
        self.done.append("DtoH")
        ctypes.memmove(target, address, size)

    def write(self, address: int, source: int, size: int) -> None:
        self.done.append("HtoD")
        ctypes.memmove(address, source, size)

    def stream(self, device: int) -> int:
        return 7

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        assert stream == 7
        self.done.append("DtoD")
        ctypes.memmove(target, source, size)

    def wait(self) -> None:
        self.done.append("wait")
