"""Tensors of pb_utils; the texts are Triton's (docs/spec/behaviours.md section 9.2)."""

from __future__ import annotations

import gc
import struct

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from headrace.messages.tensor import BytesTensor
from triton_python_backend_utils import named_tensor


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        *[("bool", 1), ("uint8", 2), ("uint16", 3), ("uint32", 4), ("uint64", 5), ("int8", 6), ("int16", 7)],
        *[("int32", 8), ("int64", 9), ("float16", 10), ("float32", 11), ("float64", 12), ("object", 13)],
        *[("S3", 13), ("U3", 13)],
    ],
)
def test_a_tensor_has_tritons_number_of_its_type(dtype: str, number: int) -> None:
    tensor = pb_utils.Tensor("x", np.zeros((2, 3), dtype))

    assert tensor.triton_dtype() == number
    assert (tensor.name(), tensor.shape(), tensor.is_cpu()) == ("x", [2, 3], True)


def test_contiguous_array_is_shared_and_another_is_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    assert pb_utils.Tensor("x", array).as_numpy() is array
    turned = pb_utils.Tensor("x", array.T).as_numpy()
    assert turned.flags.c_contiguous
    np.testing.assert_array_equal(turned, array.T)


def test_scalar_has_no_axes() -> None:
    assert pb_utils.Tensor("x", np.array(3.0)).shape() == []


def test_other_byte_order_becomes_this_machines() -> None:
    tensor = pb_utils.Tensor("x", np.arange(3, dtype=">f4"))

    assert tensor.triton_dtype() == 11
    assert tensor.as_numpy().dtype == np.dtype("=f4")
    assert tensor.as_numpy().tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["complex64", "datetime64[s]", "float128"])
def test_type_that_triton_lacks_is_refused(dtype: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^NumPy dtype is not supported\.$"):
        pb_utils.Tensor("x", np.zeros(2, dtype))


def test_empty_name_is_refused() -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        pb_utils.Tensor("", np.zeros(2))


def test_list_is_no_array() -> None:
    with pytest.raises(TypeError, match="found type 'list'"):
        pb_utils.Tensor("x", [1, 2])  # type: ignore[arg-type]


def test_received_strings_are_bytes_in_shape() -> None:
    wire = b"".join(struct.pack("<I", len(item)) + item for item in [b"a", b"", b"bcd", b"\xff\x00"])
    tensor = pb_utils.Tensor._received("x", BytesTensor(wire, (2, 2)))

    strings = tensor.as_numpy()
    assert (strings.dtype, strings.shape) == (np.dtype(object), (2, 2))
    assert strings.tolist() == [[b"a", b""], [b"bcd", b"\xff\x00"]]
    assert tensor.as_numpy() is strings


@pytest.mark.parametrize("dtype", ["object", "U"])
def test_text_is_sent_as_utf8_and_read_unchanged(dtype: str) -> None:
    array = np.array(["é", "abc"], dtype)
    tensor = pb_utils.Tensor("x", array)

    assert tensor.as_numpy() is array
    wire = tensor._wire()
    assert isinstance(wire, BytesTensor)
    assert wire.items() == ["é".encode(), b"abc"]


def test_string_written_into_a_received_tensor_is_sent() -> None:
    tensor = pb_utils.Tensor._received("x", BytesTensor.from_items([b"a", b"b"], (2,)))
    tensor.as_numpy()[1] = b"changed"

    wire = tensor._wire()
    assert isinstance(wire, BytesTensor)
    assert wire.items() == [b"a", b"changed"]


def test_received_elements_can_be_written_without_changing_their_owners() -> None:
    received = np.arange(4, dtype=np.int32)
    received.flags.writeable = False
    tensor = pb_utils.Tensor._received("x", received)

    array = tensor.as_numpy()
    array += 1

    assert tensor.as_numpy() is array
    assert received.tolist() == [0, 1, 2, 3]


def test_bf16_is_refused_to_numpy() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensor = pb_utils.Tensor("x", np.zeros(2, ml_dtypes.bfloat16))

    assert tensor.triton_dtype() == 14
    with pytest.raises(
        pb_utils.TritonModelException,
        match=r"^Tensor dtype is BF16 and cannot be converted to NumPy\. Use to_dlpack\(\) and from_dlpack\(\) instead",
    ):
        tensor.as_numpy()


ITEMS = [b"item %d" % number for number in range(5000)]


def received() -> pb_utils.Tensor:
    return pb_utils.Tensor._received("x", BytesTensor.from_items(ITEMS, (5, 1000)))


def sent(array: np.ndarray[tuple[int, ...], np.dtype[np.object_]]) -> BytesTensor:
    wire = pb_utils.Tensor("y", array)._wire()
    assert isinstance(wire, BytesTensor)
    return wire


def test_received_strings_are_sent_on_unchanged() -> None:
    wire = BytesTensor.from_items(ITEMS, (5, 1000))
    array = pb_utils.Tensor._received("x", wire).as_numpy()

    assert sent(array).buffer.obj is wire.buffer.obj
    array.shape = (1000, 5)
    assert sent(array).buffer.obj is wire.buffer.obj
    assert sent(array).shape == (1000, 5)


@pytest.mark.parametrize("change", [b"other", "text", 7])
def test_one_changed_string_is_sent(change: object) -> None:
    array = received().as_numpy()
    array[4, 999] = change

    text = change if isinstance(change, bytes) else str(change).encode()
    assert sent(array).items() == [*ITEMS[:-1], text]


def test_copies_and_views_are_sent_as_they_are() -> None:
    array = received().as_numpy()
    array[0, 0] = b"changed"

    assert sent(array.copy()).items() == [b"changed", *ITEMS[1:]]
    assert sent(array[:1]).items() == [b"changed", *ITEMS[1:1000]]
    assert sent(array.T).items() == array.T.ravel().tolist()


def test_memory_is_released_with_the_array() -> None:
    array = received().as_numpy()
    assert len(named_tensor._decoded) == 1
    del array
    gc.collect()
    assert named_tensor._decoded == {}


def test_small_tensors_are_not_kept() -> None:
    array = pb_utils.Tensor._received("x", BytesTensor.from_items([b"a"], (1,))).as_numpy()
    assert array.tolist() == [b"a"]
    assert named_tensor._decoded == {}
