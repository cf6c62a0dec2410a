"""A CUDA driver simulated with files, for processes without a GPU. Each allocation is a file in one folder, which other
processes open by its handle. The server and its children install it. Its one device is a GPU by its number; only this
library can read its memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from headrace_engines import AddressedTensor, CudaError, CudaLibrary, address_of, cuda_calls

UUID = "0123456789abcdef" * 2


class PlayedCuda(CudaLibrary):
    """``done`` has the name of each call that copies, waits, opens or closes, and ``open`` files are those in use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[str] = []
        self.mapped: dict[int, tuple[mmap.mmap, str]] = {}
        self.own: set[str] = set()

    def devices(self) -> list[str]:
        return [UUID]

    def use(self, device: int) -> None:
        assert device == 0

    @contextmanager
    def using(self, device: int) -> Iterator[None]:
        self.use(device)
        yield

    def allocate(self, size: int) -> int:
        name = uuid4().hex
        with (self.folder / name).open("xb") as file:
            file.truncate(size)
        self.own.add(name)
        return self._map(name)

    def free(self, address: int) -> None:
        _, name = self.mapped.pop(address)
        self.own.remove(name)
        (self.folder / name).unlink()

    def export(self, address: int) -> bytes:
        return self.mapped[address][1].encode().ljust(64, b"\0")

    def open(self, handle: bytes) -> int:
        name = handle.rstrip(b"\0").decode()
        if name in self.own:
            raise CudaError("cuIpcOpenMemHandle_v2 failed with CUresult 201")
        if not (self.folder / name).exists():
            raise CudaError("cuIpcOpenMemHandle_v2 failed with CUresult 1")
        self.done.append("open")
        return self._map(name)

    def close(self, address: int) -> None:
        self.done.append("close")
        del self.mapped[address]

    def size(self, address: int) -> int:
        return len(self.mapped[address][0])

    def read(self, target: int, address: int, size: int) -> None:
        self.done.append("DtoH")
        ctypes.memmove(target, address, size)

    def write(self, address: int, source: int, size: int) -> None:
        self.done.append("HtoD")
        ctypes.memmove(address, source, size)

    def new_stream(self) -> int:
        return 7

    def stream(self, device: int) -> int:
        return 7

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.done.append("DtoD")
        ctypes.memmove(target, source, size)

    def wait(self) -> None:
        self.done.append("wait")

    def _map(self, name: str) -> int:
        with (self.folder / name).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.mapped[address] = memory, name
        return address


def install(folder: str) -> PlayedCuda:
    """Make this process use a driver in ``folder``, and return it."""
    played = PlayedCuda(Path(folder))
    cuda_calls.cuda_library.cache_clear()
    cuda_calls.CudaLibrary = lambda: played  # type: ignore[misc,assignment]
    return played


class _Memory:
    device = 2, 0

    def __init__(self, library: CudaLibrary, content: bytes) -> None:
        self._library = library
        self._address = library.allocate(max(len(content), 1))
        library.write(self._address, address_of_bytes(content), len(content))

    def address(self, offset: int) -> int:
        return self._address + offset

    def copy(self, offset: int, size: int) -> memoryview:
        content = np.empty(size, np.uint8)
        self._library.read(content.ctypes.data, self._address + offset, size)
        return content.data

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._library.free(self._address)


def address_of_bytes(content: bytes) -> int:
    return int(np.frombuffer(content, np.uint8).ctypes.data)


def on_gpu(array: Any, library: CudaLibrary | None = None) -> AddressedTensor:
    """Return a copy of ``array`` on the device, as a framework's tensor."""
    array = np.ascontiguousarray(array)
    memory = _Memory(library or cuda_calls.cuda_library(), array.tobytes())
    return AddressedTensor(memory, 0, array.shape, array.dtype)


def elements(tensor: Any, shape: Sequence[int], dtype: Any = np.float32) -> Any:
    """Return the elements of a tensor on the device, read by its capsule."""
    capsule = tensor.to_dlpack()
    array = np.empty(shape, dtype)
    address = address_of(capsule)
    assert address is not None
    cuda_calls.cuda_library().read(array.ctypes.data, address, array.nbytes)
    return array
