"""CUDA regions: memory that another process has allocated on a GPU. Without a GPU, the answer of such a Triton."""

from __future__ import annotations

import base64
import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from headrace_shm import cuda_memory
from headrace_shm.cuda_memory import CudaError, CudaLibrary, CudaMemory, open_region

from .recorded import write_repository

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: Allocates 8192 bytes, of which the first 32 are eight floats; prints its IPC handle, and then the bytes at 4096.
OWNER = """
import ctypes, struct, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, (name, code)
device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(8192))
numbers = struct.pack("8f", *range(8)) + bytes(8160)
call("cuMemcpyHtoD_v2", address, numbers, ctypes.c_size_t(8192))
handle = ctypes.create_string_buffer(64)
call("cuIpcGetMemHandle", handle, address)
print(handle.raw.hex(), flush=True)
sys.stdin.readline()
found = ctypes.create_string_buffer(32)
call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(address.value + 4096), ctypes.c_size_t(32))
print(found.raw.hex(), flush=True)
"""


def why_no_gpu() -> str:
    try:
        CudaLibrary().use(0)
    except CudaError as error:
        return str(error)
    return ""


@contextmanager
def owner() -> Iterator[tuple[bytes, Callable[[], bytes]]]:
    """Yield the handle of another process's memory, and what returns its bytes from 4096 on."""
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def read() -> bytes:
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return bytes.fromhex(process.stdout.readline())  # type: ignore[union-attr]

        try:
            yield bytes.fromhex(process.stdout.readline()), read
        finally:
            process.kill()


@pytest.mark.gpu
@pytest.mark.skipif(bool(why_no_gpu()), reason=f"no GPU: {why_no_gpu()}")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_inputs_and_outputs_lie_on_a_gpu(serve: Callable[..., Headrace], tmp_path: Path, protocol: str) -> None:
    write_repository(tmp_path, "identity")
    server = serve(f"--model-repository={tmp_path}", "--allow-client-shm=true")
    module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
    with owner() as (handle, read), module.InferenceServerClient(f"127.0.0.1:{getattr(server, protocol)}") as client:
        client.register_cuda_shared_memory("r", base64.b64encode(handle), 0, 8192)
        for size in (8193, 1 << 40):
            with pytest.raises(module.InferenceServerException, match="the allocation is smaller than the region"):
                client.register_cuda_shared_memory("large", base64.b64encode(handle), 0, size)
        tensor, wanted = module.InferInput("x", [8], "FP32"), module.InferRequestedOutput("y")
        tensor.set_shared_memory("r", 32)
        wanted.set_shared_memory("r", 32, offset=4096)
        client.infer("numbers", [tensor], outputs=[wanted])
        client.unregister_cuda_shared_memory("r")
        assert read() == np.arange(8, dtype=np.float32).tobytes()


class CountingDriver(CudaLibrary):
    """Counts how often its only allocation, of 64 bytes, is open. Takes the place of a driver where there is no GPU."""

    def __init__(self) -> None:
        self.opened = 0

    def use(self, device: int) -> None:
        assert device == 0

    def open(self, handle: bytes) -> int:
        self.opened += 1
        return 4096

    def close(self, address: int) -> None:
        self.opened -= 1

    def size(self, address: int) -> int:
        return 64


def test_a_refused_region_leaves_those_of_the_same_allocation_open() -> None:
    driver = CountingDriver()
    memory = CudaMemory(driver, bytes(64), 0, 64)
    with pytest.raises(CudaError, match="smaller than the region"):
        CudaMemory(driver, bytes(64), 0, 65)
    assert driver.opened == 1
    del memory
    assert driver.opened == 0


def test_without_a_gpu_the_answer_is_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ctypes.CDLL

    def load(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "libcuda.so.1":
            raise OSError("libcuda.so.1: cannot open shared object file")
        return real(name, *arguments, **options)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(cuda_memory, "_driver", None)
    with pytest.raises(Exception, match=r"^failed to register CUDA shared memory region: 'r', GPUs not supported$"):
        open_region("r", bytes(64), 0, 64)
