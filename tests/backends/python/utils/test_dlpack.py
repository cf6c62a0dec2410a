"""DLPack in both directions, against NumPy and PyTorch."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils

torch = pytest.importorskip("torch")

TYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


@pytest.mark.parametrize("name", TYPES)
def test_elements_are_shared_with_torch_both_ways(name: str) -> None:
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(name)
    tensor = torch.from_dlpack(pb_utils.Tensor("x", array))

    assert tensor.dtype == getattr(torch, name)
    assert tensor.tolist() == array.tolist()
    tensor[1, 1] = 0
    assert array[1, 1] == 0

    back = pb_utils.Tensor.from_dlpack("y", tensor).as_numpy()
    assert back.dtype == array.dtype
    back[0, 1] = 0
    assert array[0, 1] == 0


@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64"])
def test_unsigned_elements_are_shared_with_numpy(name: str) -> None:
    array = np.arange(4, dtype=name)
    there = np.from_dlpack(pb_utils.Tensor("x", array))

    assert there.dtype == array.dtype
    assert np.shares_memory(there, array)
    assert np.shares_memory(pb_utils.Tensor.from_dlpack("y", array).as_numpy(), array)


def test_bf16_passes_both_ways() -> None:
    source = torch.tensor([1.5, -2.0, 0.0], dtype=torch.bfloat16)
    tensor = pb_utils.Tensor.from_dlpack("x", source)

    assert (tensor.triton_dtype(), tensor.shape()) == (14, [3])
    back = torch.from_dlpack(tensor)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, source)
    back[0] = 7
    assert source[0] == 7


def test_a_capsule_is_consumed_once_and_exported_again() -> None:
    source = torch.arange(3)
    capsule = torch.utils.dlpack.to_dlpack(source)
    tensor = pb_utils.Tensor.from_dlpack("x", capsule)

    assert tensor.as_numpy().tolist() == [0, 1, 2]
    with pytest.raises(pb_utils.TritonModelException, match="Provided tensor is not supported"):
        pb_utils.Tensor.from_dlpack("x", capsule)
    for _ in range(2):
        assert torch.utils.dlpack.from_dlpack(tensor.to_dlpack()).tolist() == [0, 1, 2]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 4), (4, 1)])
def test_any_shape_passes(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float32)

    assert tuple(torch.from_dlpack(pb_utils.Tensor("x", array)).shape) == shape
    assert pb_utils.Tensor.from_dlpack("x", torch.ones(shape)).as_numpy().shape == shape


class Owner(np.ndarray[Any, np.dtype[np.float32]]):
    """An array with weak references."""


def test_elements_live_as_long_as_their_last_reader() -> None:
    array = np.arange(4, dtype=np.float32).view(Owner)
    seen = weakref.ref(array)
    tensor = torch.from_dlpack(pb_utils.Tensor("x", array))
    del array
    gc.collect()
    assert seen() is not None
    assert tensor.tolist() == [0, 1, 2, 3]

    back = pb_utils.Tensor.from_dlpack("y", tensor)
    del tensor
    gc.collect()
    assert seen() is not None
    assert back.as_numpy().tolist() == [0, 1, 2, 3]

    del back
    gc.collect()
    assert seen() is None


def test_an_unused_capsule_frees_its_elements() -> None:
    array = np.arange(4, dtype=np.float32).view(Owner)
    seen = weakref.ref(array)
    capsule = pb_utils.Tensor("x", array).to_dlpack()
    del array
    gc.collect()
    assert seen() is not None

    del capsule
    gc.collect()
    assert seen() is None


def test_received_elements_are_copied_before_export() -> None:
    received = np.arange(3)
    received.flags.writeable = False
    tensor = pb_utils.Tensor._received("x", received)

    torch.from_dlpack(tensor)[0] = 9

    assert received.tolist() == [0, 1, 2]
    assert tensor.as_numpy().tolist() == [9, 1, 2]


@pytest.mark.parametrize("strided", [torch.zeros(4, 4)[:, ::2], torch.zeros(2, 3).T, np.zeros((4, 4))[::2]])
def test_strides_are_refused(strided: object) -> None:
    with pytest.raises(
        pb_utils.TritonModelException,
        match=r"^DLPack tensor is not contiguous\. Only contiguous DLPack tensors that are stored in C-Order are supp",
    ):
        pb_utils.Tensor.from_dlpack("x", strided)


def test_strides_of_an_axis_of_one_do_not_matter() -> None:
    column = torch.zeros(4, 6)[:, :1].T.contiguous().T
    assert pb_utils.Tensor.from_dlpack("x", torch.as_strided(column, (4, 1), (1, 99))).shape() == [4, 1]


def test_strings_are_refused() -> None:
    for tensor in (pb_utils.Tensor("x", np.array([b"a"], object)), pb_utils.Tensor("x", np.array([b"a"]))):
        with pytest.raises(pb_utils.TritonModelException, match=r"^DLPack does not have support for string tensors\.$"):
            tensor.to_dlpack()


@pytest.mark.parametrize("what", [3, None, [1.0], object()])
def test_an_object_that_is_no_tensor_is_refused(what: object) -> None:
    with pytest.raises(
        pb_utils.TritonModelException,
        match=r"^Provided tensor is not supported\. Tensor must be a DLPack capsule or have `__dlpack__` and ",
    ):
        pb_utils.Tensor.from_dlpack("x", what)


def test_a_type_that_triton_lacks_is_refused() -> None:
    source = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(pb_utils.TritonModelException, match=r"not supported \(code 5, 64 bits, 1 lanes\)"):
        pb_utils.Tensor.from_dlpack("x", source)
    assert source.tolist() == [0, 0]


def test_empty_name_is_refused() -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        pb_utils.Tensor.from_dlpack("", torch.zeros(2))


def test_device_is_the_host() -> None:
    assert pb_utils.Tensor("x", np.zeros(2)).__dlpack_device__() == (1, 0)


class OnDevice:
    """A tensor of the host whose capsule declares a device, as a framework for GPUs has it."""

    def __init__(self, device: int) -> None:
        self.tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
        self.device = device

    def __dlpack__(self, stream: object = None) -> object:
        capsule = self.tensor.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
        pointer = get(capsule, b"dltensor")
        ctypes.c_int32.from_address(pointer + 8).value = self.device
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def cpu(self) -> object:
        return self.tensor.clone()


def test_device_tensor_stays_there_until_it_is_sent() -> None:
    source = OnDevice(2)
    tensor = pb_utils.Tensor.from_dlpack("x", source)

    assert (tensor.is_cpu(), tensor.shape(), tensor.triton_dtype()) == (False, [2, 3], 11)
    assert tensor.__dlpack_device__() == (2, 0)
    assert 'object "dltensor"' in repr(tensor.to_dlpack())
    with pytest.raises(
        pb_utils.TritonModelException, match=r"^Tensor is stored in GPU and cannot be converted to NumPy\.$"
    ):
        tensor.as_numpy()
    np.testing.assert_array_equal(tensor._wire(), source.tensor.numpy())


def test_a_device_tensor_that_cannot_be_copied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OnDevice, "cpu")
    tensor = pb_utils.Tensor.from_dlpack("x", OnDevice(2))

    with pytest.raises(pb_utils.TritonModelException, match="'OnDevice' has no way to copy it to the host"):
        pb_utils.InferenceResponse([tensor])._message()


def test_other_devices_are_refused() -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^DLDevice type 10 is not support by Python backend\.$"):
        pb_utils.Tensor.from_dlpack("x", OnDevice(10))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_cuda_tensor_is_shared_and_copied_when_sent(dtype: Any) -> None:
    source = torch.tensor([0, 1, 2, 3], device="cuda").to(dtype)
    tensor = pb_utils.Tensor.from_dlpack("x", source)

    assert not tensor.is_cpu()
    assert tensor.__dlpack_device__() == (2, source.device.index)
    assert torch.from_dlpack(tensor).data_ptr() == source.data_ptr()
    raw = pb_utils.Tensor.from_dlpack("x", torch.utils.dlpack.to_dlpack(source))
    assert torch.utils.dlpack.from_dlpack(raw.to_dlpack()).data_ptr() == source.data_ptr()
    wire = tensor._wire()
    assert isinstance(wire, np.ndarray)
    assert wire.tobytes() == source.cpu().view(torch.uint8).numpy().tobytes()
