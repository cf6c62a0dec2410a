"""docs/spec/behaviours.md section 3.4. The oracle is sorting in plain Python."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.errors import InvalidArgument
from headrace.messages.tensor import BytesTensor
from headrace_hosts.classification import MAX_ELEMENTS, classify

ORDERED = [np.dtype(name) for name in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")]


def strings(tensor: BytesTensor) -> Any:
    return tensor.to_objects().tolist()


@given(
    array=st.sampled_from(ORDERED).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=4))
    ),
    count=st.integers(1, 20),
)
def test_integers_rank_as_python_sorts_them(array: npt.NDArray[Any], count: int) -> None:
    got = strings(classify(array, count, (), is_batched=True))
    for row, ranked in zip(array.reshape(len(array), -1).tolist(), got, strict=True):
        order = sorted(range(len(row)), key=lambda index: (-row[index], index))[:count]
        assert ranked == [f"{row[index]}:{index}".encode() for index in order]


def test_floats_have_six_decimals_and_labels_where_there_are_some() -> None:
    array = np.array([0.5, -1.25, 2], np.float32)
    got = classify(array, 9, ["a", "", "c"], is_batched=False)
    assert got.shape == (3,)
    assert strings(got) == [b"2.000000:2:c", b"0.500000:0:a", b"-1.250000:1"]


def test_not_a_number_ranks_last() -> None:
    got = strings(classify(np.array([np.nan, -np.inf, 1.0]), 1, (), is_batched=False))
    assert got == [b"1.000000:2"]


def test_no_elements_give_no_classes() -> None:
    assert classify(np.empty((2, 0), np.float32), 3, (), is_batched=True).shape == (2, 0)
    assert classify(np.empty((0, 4), np.float32), 3, (), is_batched=True).shape == (0, 3)


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        (np.zeros(2, np.float16), "FP16"),
        (np.zeros(2, ml_dtypes.bfloat16), "BF16"),
        (np.zeros(2, np.bool_), "BOOL"),
        (BytesTensor.from_items([b"a"], (1,)), "BYTES"),
    ],
)
def test_types_without_an_order_are_refused(tensor: Any, name: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        classify(tensor, 1, (), is_batched=False)
    assert error.value.message == f"class result not available for output due to unsupported type '{name}'"


def test_huge_items_are_refused_and_huge_batches_are_not() -> None:
    with pytest.raises(InvalidArgument, match=r"^classification output tensor too large$"):
        classify(np.zeros(MAX_ELEMENTS + 1, np.uint8), 1, (), is_batched=False)
    assert classify(np.zeros((MAX_ELEMENTS // 1000 + 1, 1000), np.uint8), 1, (), is_batched=True).shape == (1001, 1)


def test_count_beyond_the_elements_is_cut() -> None:
    assert classify(np.zeros(3, np.int8), 2**31, (), is_batched=False).shape == (3,)


@pytest.mark.parametrize("count", [9_000, 20_000])
def test_many_classes_are_made_in_slices(count: int) -> None:
    array = np.random.default_rng(1).permutation(40_000).reshape(2, 20_000)
    got = strings(classify(array, count, (), is_batched=True))
    for row, ranked in zip(array.tolist(), got, strict=True):
        order = sorted(range(len(row)), key=row.__getitem__, reverse=True)[:count]
        assert ranked == [f"{row[index]}:{index}".encode() for index in order]
