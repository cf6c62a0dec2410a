"""CUDA regions: memory that another process has allocated on a GPU. Without a GPU, the answer of such a Triton."""

from __future__ import annotations

import base64
import ctypes
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from headrace import Backend, DeviceTensor, Instance, Model, Server, Spec, Tensors, builtins, dtypes, hookimpl
from headrace_engines import AddressedTensor, CudaError, CudaLibrary, address_of, cuda_library
from headrace_shm import cuda_memory
from headrace_shm.cuda_memory import CudaMemory, open_region
from headrace_testing.played_tensors import PlayedDeviceTensor
from headrace_testing.serving import serve as serve_here

from .played_driver import PlayedDriver
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
def test_inputs_and_outputs_are_on_a_gpu(serve: Callable[..., Headrace], tmp_path: Path, protocol: str) -> None:
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
    """Replaces the driver without a GPU. Counts the openings of its only allocation, of 64 bytes."""

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


def test_a_refused_region_does_not_close_others_of_the_allocation() -> None:
    driver = CountingDriver()
    memory = CudaMemory(driver, bytes(64), 0, 64)
    with pytest.raises(CudaError, match="smaller than the region"):
        CudaMemory(driver, bytes(64), 0, 65)
    assert driver.opened == 1
    del memory
    assert driver.opened == 0


def test_without_a_gpu_the_answer_equals_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ctypes.CDLL

    def load(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "libcuda.so.1":
            raise OSError("libcuda.so.1: cannot open shared object file")
        return real(name, *arguments, **options)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(cuda_memory, "_driver", None)
    cuda_library.cache_clear()
    with pytest.raises(Exception, match=r"^failed to register CUDA shared memory region: 'r', GPUs not supported$"):
        open_region("r", bytes(64), 0, 64)


class Elsewhere(PlayedDeviceTensor):
    """A tensor on a device that no region is on."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 5


class Doubled(Instance):
    """Doubles ``x`` in place."""

    takes_device_tensors = True
    kind: type[PlayedDeviceTensor] = PlayedDeviceTensor

    def __init__(self, model: Model) -> None:
        self.received: list[Any] = RECEIVED
        self.kind = Elsewhere if model.name == "elsewhere" else PlayedDeviceTensor

    def execute(self, inputs: Tensors) -> Tensors:
        x: Any = inputs["x"]
        self.received.append((type(x), getattr(x, "__dlpack_device__", tuple)()))
        y: Any = self.kind(2 * np.from_dlpack(x), COPIES)
        return {"y": y}


class OnDevice(Backend):
    name = "on_device"

    def load(self, model: Model) -> Instance:
        return Doubled(model)


RECEIVED: list[Any] = []
#: The shape of each copy of a result to the host.
COPIES: list[tuple[int, ...]] = []
IO = 'input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }'


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root, own = tmp_path_factory.mktemp("models"), builtins.register_backends()
    for name, backend in (("doubled", "on_device"), ("elsewhere", "on_device"), ("host", "identity")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(f'backend: "{backend}" {IO}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "register_backends", hookimpl(lambda: [*own, OnDevice]))
        with serve_here(root, listen=True, allow_client_shm=True) as server:
            yield server


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> PlayedDriver:
    driver = PlayedDriver()
    monkeypatch.setattr(cuda_memory, "_driver", driver)
    RECEIVED.clear()
    COPIES.clear()
    return driver


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("model", "factor", "offset", "copies"),
    [
        ("doubled", 2, 64, ["DtoD"]),
        ("doubled", 2, 4, ["DtoH", "DtoD"]),  # a kernel can not read it there
        ("elsewhere", 2, 64, ["HtoD"]),
        ("host", 1, 64, ["DtoH", "HtoD"]),
    ],
)
def test_a_model_on_the_device_reads_and_writes_regions_there(
    played: Server, driver: PlayedDriver, protocol: str, model: str, factor: int, offset: int, copies: list[str]
) -> None:
    module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
    port = getattr(played.options, f"{protocol}_port")
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.register_cuda_shared_memory("r", base64.b64encode(bytes(64)), 0, 8192)
        tensor, wanted = module.InferInput("x", [8], "FP32"), module.InferRequestedOutput("y")
        tensor.set_shared_memory("r", 32, offset=offset)
        wanted.set_shared_memory("r", 32, offset=4096)
        for number in range(2):  # the second message is not parsed again
            x = np.arange(8, dtype=np.float32) + number
            driver.memory[offset : offset + 32] = x.view(np.uint8)
            found = client.infer(model, [tensor], outputs=[wanted])
            assert found.get_output("y") is not None
            assert driver.memory[4096:4128].tobytes() == (factor * x).tobytes()
        small = module.InferRequestedOutput("y")
        small.set_shared_memory("r", 28, offset=4096)
        with pytest.raises(module.InferenceServerException, match="should be at least 32 bytes"):
            client.infer(model, [tensor], outputs=[small])
        client.unregister_cuda_shared_memory("r")
    assert driver.closed.wait(10)
    in_place = model != "host" and offset == 64
    refused = [each for each in copies[:-1] if each == "DtoH"]
    assert driver.done == copies * 2 + refused + ["wait"] * in_place + ["close"]
    assert ([(8,)] * 2 if model == "elsewhere" else []) == COPIES
    if model != "host":
        assert [(AddressedTensor, (1, 0)) if in_place else (np.ndarray, (1, 0))] * 3 == RECEIVED


def tensor_of(memory: CudaMemory, offset: int = 0, size: int = 32, **spec: Any) -> DeviceTensor | None:
    fields: dict[str, Any] = {"datatype": dtypes.FP32, "dims": (2, 4)} | spec
    return memory.tensor(offset, size, Spec("x", **fields))


def test_a_tensor_keeps_its_region_open_until_its_last_reader_and_the_device_are_done() -> None:
    driver = PlayedDriver()
    driver.memory[32:64] = np.arange(8, dtype=np.float32).view(np.uint8)
    memory = CudaMemory(driver, bytes(64), 0, 8192)
    tensor = tensor_of(memory, 32)
    assert tensor is not None
    capsule = tensor.__dlpack__(stream=3, max_version=(1, 0))
    assert address_of(capsule) == driver.memory.ctypes.data + 32
    part = tensor[1:].reshape((4,))
    read, memory_reference = np.from_dlpack(part), weakref.ref(memory)
    del memory, tensor, capsule, part
    np.testing.assert_array_equal(read, [4, 5, 6, 7])
    driver.memory[48:52] = 0
    assert read[0] == 0, "it is read where it lies"
    assert memory_reference() is not None
    assert driver.done == []
    del read
    assert memory_reference() is None
    assert driver.closed.wait(10)
    assert driver.done == ["wait", "close"]


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": 4},
        {"size": 28},
        {"dims": (-2, -4)},
        {"size": 0, "dims": (0, 4)},
        {"datatype": dtypes.BYTES},
        {"dims": (1,) * 33 + (8,)},
    ],
)
def test_unaligned_memory_is_copied(fields: dict[str, Any]) -> None:
    assert tensor_of(CudaMemory(PlayedDriver(), bytes(64), 0, 8192), **fields) is None


def test_a_result_with_gaps_is_not_copied_within_the_device() -> None:
    driver = PlayedDriver()
    memory = CudaMemory(driver, bytes(64), 0, 8192)

    class Gaps(PlayedDeviceTensor):
        def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
            return self.memory.__dlpack__()

    whole = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert not memory.take(0, Gaps(whole[:, :2]))
    assert memory.take(0, Gaps(whole))
    assert driver.memory[:32].tobytes() == whole.tobytes()
    assert not memory.take(0, PlayedDeviceTensor(whole[:0]))
    assert driver.done == ["DtoD"]
