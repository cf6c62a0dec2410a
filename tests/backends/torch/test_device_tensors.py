"""Tensors between models of an ensemble, on a device that the CPU plays: PyTorch treats it as it treats a GPU, except
for streams."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import BytesTensor, Server, Spec, StackedTensors, dtypes
from headrace_testing import BackendConformance, Example
from headrace_testing.played_tensors import PlayedDeviceTensor
from headrace_testing.serving import serve
from headrace_torch.tensor_conversion import TensorConverter
from headrace_torch.torch_tensors import TorchTensor, as_torch
from tests.backends.torch.chains import CHAIN, Twice, write_chain

X = np.arange(8, dtype=np.float32).reshape(2, 4)


class Kit(BackendConformance):
    """For the check that runs below; pytest does not collect it."""

    plugin, backend, heavy = "headrace_torch", "pytorch", ("torch",)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let results on the CPU stay there. The copies to the host are added to the list."""
    found: list[tuple[int, ...]] = []
    copy = TorchTensor.copy_to_host

    def counted(tensor: TorchTensor) -> Any:
        found.append(tensor.shape)
        return copy(tensor)

    monkeypatch.setattr("headrace_torch.tensor_conversion.stays", lambda device: True)
    monkeypatch.setattr(TorchTensor, "copy_to_host", counted)
    return found


@pytest.fixture
def server(copies: list[Any], tmp_path: Path) -> Iterator[Server]:
    write_chain(tmp_path, "KIND_CPU")
    with serve(tmp_path) as server:
        yield server


def test_three_models_pass_tensors_on_and_only_the_output_is_copied(server: Server, copies: list[Any]) -> None:
    copies.clear()
    for rows in (1, 2, 2):
        x = X[:rows]
        np.testing.assert_array_equal(np.asarray(server.infer("chain", {"x": x}).outputs["y"]), CHAIN(x))
    assert copies == [(1, 4), (2, 4), (2, 4)]
    copies.clear()
    with ThreadPoolExecutor(8) as callers:
        arrays = [X + number for number in range(24)]
        for x, answer in zip(arrays, callers.map(lambda x: server.infer("chain", {"x": x}), arrays), strict=True):
            np.testing.assert_array_equal(np.asarray(answer.outputs["y"]), CHAIN(x))
    assert sum(shape[0] for shape in copies) == 48


def test_a_client_of_a_step_gets_host_tensors(server: Server) -> None:
    found = server.infer("script", {"x": X}).outputs["y"]
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, X * 2)


def converter(copies: list[Any], writes: bool = False, state_memory: frozenset[int] = frozenset(), **more: Any) -> Any:
    return TensorConverter(torch, "cpu", {"y": 0}, writes, state_memory, **more)


def test_inputs_are_views_unless_the_model_writes_to_them(copies: list[Any]) -> None:
    (result,) = converter(copies).results(torch.from_numpy(X.copy())).values()
    assert isinstance(result, TorchTensor)
    assert converter(copies).tensor("x", result[:1]).data_ptr() == result.tensor.data_ptr()
    assert converter(copies, writes=True).tensor("x", result).data_ptr() != result.tensor.data_ptr()
    assert copies == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_every_type_survives_a_round_trip(copies: list[Any], dtype: Any) -> None:
    value = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    (result,) = converter(copies).results(value).values()
    again = converter(copies).tensor("x", StackedTensors([result[1:], result[:1].to_host()]))
    assert torch.equal(again, value.flip(0))
    assert again.dtype is dtype
    (arrays,) = TensorConverter(torch, "cpu", {"y": 0}, False).results(value).values()
    np.testing.assert_array_equal(np.asarray(result), np.asarray(arrays))


def test_tensors_of_another_engine_are_read_by_dlpack(copies: list[Any]) -> None:
    foreign = PlayedDeviceTensor(X.copy())
    assert torch.equal(converter(copies).tensor("x", foreign), torch.from_numpy(X))
    assert foreign.copies == []
    mixed = StackedTensors([foreign[:1], X])
    assert torch.equal(converter(copies).tensor("x", mixed), torch.from_numpy(np.concatenate([X[:1], X])))
    assert converter(copies).tensor("s", BytesTensor.from_items([b"a"], [1])) == ["a"]


def test_memory_that_the_model_keeps_is_copied_on_the_device(copies: list[Any]) -> None:
    value = torch.zeros(2, 4)
    state_memory = frozenset([value.untyped_storage().data_ptr()])
    for made in (converter(copies, state_memory=state_memory), converter(copies, reuses=True)):
        (result,) = made.results(value).values()
        assert result.tensor.data_ptr() != value.data_ptr()
    assert copies == []


def test_a_scalar_has_the_shape_1(copies: list[Any]) -> None:
    (result,) = converter(copies).results(torch.tensor(3.0)).values()
    assert result.shape == (1,)


def test_the_kit_accepts_it(copies: list[Any], write_script: Any, tmp_path: Path) -> None:
    write_script(Twice(), tmp_path / "model.pt")
    kit = Kit()
    kit.test_tensors_on_a_device_are_read_like_arrays(Example(tmp_path, {"x": X}, {"y__0": X * 2}))


def test_a_cuda_region_is_used_in_place(copies: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, cuda_memory = pytest.importorskip("tritonclient.http"), pytest.importorskip("headrace_shm.cuda_memory")
    from tests.extensions.shm.played_driver import PlayedDriver

    driver = PlayedDriver()
    monkeypatch.setattr(cuda_memory, "_driver", driver)
    write_chain(tmp_path, "KIND_CPU")
    options: Any = {"allow_client_shm": True, "model_control_mode": "explicit", "load_model": ["eager"]}
    with serve(tmp_path, listen=True, **options) as server:
        copies.clear()
        with client.InferenceServerClient(f"127.0.0.1:{server.options.http_port}") as connection:
            connection.register_cuda_shared_memory("r", b"A" * 86 + b"==", 0, 8192)
            tensor, output = client.InferInput("x", [2, 4], "FP32"), client.InferRequestedOutput("y")
            tensor.set_shared_memory("r", 32)
            output.set_shared_memory("r", 32, offset=4096)
            driver.memory[:32] = X.ravel().view(np.uint8)
            connection.infer("eager", [tensor], outputs=[output])
            connection.unregister_cuda_shared_memory("r")
    assert driver.closed.wait(10)
    assert driver.memory[4096:4128].tobytes() == (X + 1).tobytes()
    assert (driver.done, copies) == (["DtoD", "wait", "close"], [])


def test_pytorch_reads_every_data_type_of_a_region() -> None:
    cuda_memory = pytest.importorskip("headrace_shm.cuda_memory")
    from tests.extensions.shm.played_driver import PlayedDriver

    driver = PlayedDriver()
    memory = cuda_memory.CudaMemory(driver, bytes(64), 0, 8192)
    for datatype in dtypes.ALL:
        if datatype is not dtypes.BYTES:
            found = as_torch(torch, memory.tensor(16, 4 * datatype.itemsize, Spec("x", datatype, (4,))), "cpu", None)
            assert str(found.dtype) == f"torch.{datatype.numpy.name}"
            assert (found.data_ptr(), found.shape) == (driver.memory.ctypes.data + 16, (4,))
