from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from headrace.errors import InvalidArgument
from headrace.messages import dtypes
from headrace.messages.dtypes import DataType
from headrace.messages.tensor import BytesTensor, as_tensor, concatenate, data_type, wire_view

Array: TypeAlias = "npt.NDArray[Any]"

strings = st.lists(st.binary(max_size=12), max_size=8)


@given(strings)
def test_strings_are_encoded_as_the_client_encodes_them(items: list[bytes]) -> None:
    array = np.empty(len(items), object)
    array[:] = items
    mine = BytesTensor.from_objects(array)
    theirs = serialize_byte_tensor(array)
    assert bytes(mine.buffer) == (theirs.item() if theirs.size else b"")
    assert mine.items() == list(deserialize_bytes_tensor(bytes(mine.buffer))) == items


#: Long enough to be guessed at; zeros and empty strings are what guessing is fooled by.
many = st.lists(st.lists(st.sampled_from([b"\0", b"\1", b"a"]), max_size=6).map(b"".join), min_size=1, max_size=6)


@given(many, st.integers(0, 300))
def test_many_strings_are_found_whatever_is_in_them(items: list[bytes], length: int) -> None:
    items = [*items * 200, b"x" * length]
    data = b"".join(len(item).to_bytes(4, "little") + item for item in items)
    tensor = BytesTensor(data, (len(items),))
    assert tensor.offsets.tolist() == list(accumulate((4 + len(item) for item in items), initial=0))
    assert tensor.items() == items


@given(st.binary(max_size=20), st.integers(0, 254))
def test_many_strings_and_something_more_are_refused(rest: bytes, length: int) -> None:
    data = b"\3\0\0\0abc" * 200 + bytes([length + 1, 0, 0, 0]) + rest[:length]
    with pytest.raises(InvalidArgument):
        _ = BytesTensor(data, (201,)).offsets


@given(strings, strings)
def test_stacked_strings_split_into_the_rows_they_came_from(first: list[bytes], second: list[bytes]) -> None:
    parts = [BytesTensor.from_items(items, (len(items), 1)) for items in (first, second)]
    stacked = concatenate(parts)
    assert isinstance(stacked, BytesTensor)
    assert stacked.rows(0, len(first)).items() == first
    assert stacked.rows(len(first), len(first) + len(second)).items() == second


ORDERS: dict[str, Callable[[Array], Array]] = {
    "as they are": lambda array: array,
    "backwards": lambda array: array[::-1],
    "in Fortran's order": np.asfortranarray,
    "every other": lambda array: np.repeat(array, 2, axis=0)[::2],
}


@pytest.mark.parametrize("dtype", [each for each in dtypes.ALL if each is not dtypes.BYTES], ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dims", [(), (4,), (0,), (2, 3), (1, 40_000)], ids=str)
def test_arrays_are_stacked_as_numpy_stacks_them(dtype: DataType, order: str, dims: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    parts = [ORDERS[order](generator.integers(0, 2, (rows, *dims)).astype(dtype.numpy)) for rows in (1, 2, 0, 3)]
    stacked = concatenate(parts)
    assert isinstance(stacked, np.ndarray)
    expected = np.concatenate(parts)
    assert (stacked.dtype, stacked.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(stacked, expected)
    assert stacked.flags.writeable, "a backend may ask for memory that can be written to"
    assert not any(np.shares_memory(stacked, part) for part in parts)


@pytest.mark.parametrize("data", [b"\x01", b"\x05\x00\x00\x00ab", b"\xff\xff\xff\xff"])
def test_malformed_strings_are_refused_when_read(data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        _ = BytesTensor(data, (1,)).offsets


@pytest.mark.parametrize("dtype", [d for d in dtypes.ALL if d is not dtypes.BYTES], ids=str)
def test_the_wire_view_of_an_array_is_its_bytes_without_a_copy(dtype: dtypes.DataType) -> None:
    array = np.arange(6).astype(dtype.numpy).reshape(2, 3)
    view = wire_view(array)
    assert bytes(view) == array.tobytes()
    assert np.shares_memory(np.frombuffer(view, np.uint8), array)
    assert data_type(array) is dtype


def test_zero_size_and_non_contiguous_arrays_have_a_wire_form_too() -> None:
    assert bytes(wire_view(np.zeros((0, 3), np.float32))) == b""
    array = np.arange(6, dtype=np.int16).reshape(2, 3).T
    assert bytes(wire_view(array)) == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("dtype", [d for d in dtypes.ALL if d not in (dtypes.BYTES, dtypes.BF16)], ids=str)
def test_numpy_dtypes_are_those_of_the_client(dtype: dtypes.DataType) -> None:
    assert dtype.numpy == np.dtype(triton_to_np_dtype(dtype.name))


def test_text_bytes_and_objects_become_strings_and_numbers_stay_arrays() -> None:
    for value in (["a", "b"], np.array([b"a", b"b"]), np.array(["a", b"b"], object)):
        tensor = as_tensor(value)
        assert isinstance(tensor, BytesTensor)
        assert tensor.items() == [b"a", b"b"]
    assert isinstance(as_tensor([1.5]), np.ndarray)
    assert data_type(as_tensor(np.arange(2, dtype=">i4"))) is dtypes.INT32


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", "?bhilqpBHILQPefd")
def test_equal_dtypes_become_one_object(kind: str, order: str) -> None:
    array: Array = np.array([0, 1], np.dtype(f"{order}{kind}"))
    tensor = as_tensor(array)
    assert isinstance(tensor, np.ndarray)
    assert tensor.dtype is np.dtype(f"{array.dtype.kind}{array.dtype.itemsize}")
    assert tensor.tolist() == array.tolist()
    assert np.shares_memory(tensor, array) == array.dtype.isnative


def test_a_dtype_with_metadata_becomes_the_one_without() -> None:
    array = np.zeros((2, 3), np.dtype(np.float32, metadata={"unit": "m"}))[:, ::-1]
    tensor = as_tensor(array)
    assert isinstance(tensor, np.ndarray)
    assert tensor.dtype is np.dtype(np.float32)
    assert tensor.strides == array.strides


def test_a_dtype_that_the_protocol_lacks_is_named() -> None:
    with pytest.raises(InvalidArgument, match="complex128"):
        data_type(np.zeros(1, complex))
