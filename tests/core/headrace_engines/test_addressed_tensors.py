"""Tensors at an address: other readers of DLPack find their elements, and the memory is kept as long as one reads."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from headrace import dtypes
from headrace_engines import DLPACK_CODES, AddressedTensor, address_of, dl_tensor, is_contiguous, is_dlpack


class HostMemory:
    """Memory of the host, which NumPy reads."""

    device = 1, 0

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def address(self, offset: int) -> int:
        return int(self.array.ctypes.data) + offset

    def copy(self, offset: int, size: int) -> memoryview:
        return memoryview(self.array.tobytes())[offset : offset + size]


def tensor_of(array: np.ndarray[Any, Any]) -> AddressedTensor:
    return AddressedTensor(HostMemory(array), 0, array.shape, array.dtype)


def test_a_reader_finds_the_elements_of_a_part() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    part = tensor_of(array)[1:3].reshape((3, 4))
    np.testing.assert_array_equal(np.from_dlpack(part), array[1:3].reshape(3, 4))
    np.testing.assert_array_equal(part.to_host(), array[1:3].reshape(3, 4))


def test_the_memory_is_kept_as_long_as_a_reader_has_it() -> None:
    memory = HostMemory(np.arange(4))
    memory_ref, array = weakref.ref(memory), np.from_dlpack(AddressedTensor(memory, 0, (4,), np.dtype(np.int64)))
    del memory
    assert memory_ref() is not None
    assert array.tolist() == [0, 1, 2, 3]
    del array
    assert memory_ref() is None


@pytest.mark.parametrize("datatype", [each for each in dtypes.ALL if each is not dtypes.BYTES], ids=str)
def test_a_capsule_has_the_data_type(datatype: dtypes.DataType) -> None:
    capsule = tensor_of(np.zeros(3, datatype.numpy)).__dlpack__()
    tensor = dl_tensor(capsule)
    assert (tensor.code, tensor.bits) == DLPACK_CODES[datatype]
    assert tensor.bits == 8 * datatype.itemsize


def test_rows_with_gaps_have_no_address() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert address_of(array.__dlpack__()) == array.ctypes.data
    assert address_of(array[:1, 1:].__dlpack__()) == array.ctypes.data + 4  # one row
    assert address_of(array[:, 1:].__dlpack__()) is None
    assert address_of(array.T.__dlpack__()) is None
    assert is_contiguous(dl_tensor(array[:0, 1:].__dlpack__()))


def test_object_that_is_no_capsule_is_refused() -> None:
    assert not is_dlpack(3)
    with pytest.raises(ValueError, match="PyCapsule"):
        dl_tensor(3)
