"""Differences of outputs. The oracles are arithmetic, and NumPy's ``isclose``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace import BytesTensor
from headrace_router.differences import Difference, Tolerance, compare, difference

EXACT = Tolerance(0, 0)


def test_numbers_differ_as_in_numpy() -> None:
    random = np.random.default_rng(1)
    expected = random.normal(size=(50, 20)).astype(np.float32)
    found = expected + random.normal(scale=1e-3, size=expected.shape).astype(np.float32)
    tolerance = Tolerance(1e-3, 1e-4)
    result = difference(expected, found, tolerance)
    a, b = expected.astype(np.float64), found.astype(np.float64)
    assert result.elements == 1000
    assert result.beyond == np.count_nonzero(~np.isclose(b, a, rtol=1e-3, atol=1e-4))
    assert result.largest == pytest.approx(np.abs(a - b).max())
    assert result.mean_relative == pytest.approx((np.abs(a - b) / np.maximum(abs(a), abs(b))).mean())


@pytest.mark.parametrize(
    ("expected", "found", "beyond", "largest"),
    [
        ([1.0, np.nan, np.inf, -np.inf], [1.0, np.nan, np.inf, -np.inf], 0, 0),
        ([1.0, 2.0], [np.nan, 2.0], 1, 1e300),
        ([np.inf, 1.0], [1.0, np.inf], 2, 1e300),
        ([np.inf], [-np.inf], 1, 1e300),
        ([0.0, 0.0], [0.0, -0.0], 0, 0),
        ([], [], 0, 0),
    ],
)
def test_infinite_and_nan_values_are_counted(expected: Any, found: Any, beyond: int, largest: float) -> None:
    result = difference(np.array(expected, np.float32), np.array(found, np.float32), EXACT)
    assert (result.elements, result.beyond, result.largest) == (len(expected), beyond, largest)
    assert 0 <= result.relative <= 2 * len(expected)


@pytest.mark.parametrize(
    ("datatype", "expected", "found", "largest"),
    [
        ("int8", 127, -128, 255),
        ("uint8", 0, 255, 255),
        ("int64", 2**53, 2**53 + 1, 1),
        ("int64", -(2**63), 2**63 - 1, 2**64 - 1),
        ("uint64", 2**64 - 1, 2**64 - 2, 1),
        ("bool", True, False, 1),
    ],
)
def test_integers_are_compared_exactly(datatype: str, expected: int, found: int, largest: float) -> None:
    result = difference(np.array([expected, 1], datatype), np.array([found, 1], datatype), EXACT)
    assert (result.elements, result.beyond, result.largest) == (2, 1, float(largest))


def test_strings_are_equal_or_not() -> None:
    expected = BytesTensor.from_objects(np.array([["a", "b", "c"]], object))
    found = BytesTensor.from_objects(np.array([["a", "B", ""]], object))
    assert difference(expected, found, Tolerance()) == Difference(3, 2, 2.0, 1.0)
    assert difference(expected, expected, Tolerance()) == Difference(3, 0, 0.0, 0.0)


def test_another_shape_or_type_or_no_output_differs_everywhere() -> None:
    row = np.ones((2, 3), np.float32)
    for found in (None, np.ones((3, 2), np.float32), np.ones(6, np.float32)):
        assert difference(row, found, Tolerance()) == Difference(6, 6, 6.0, 0.0)
    assert difference(row, np.ones((2, 3), np.int64), Tolerance()) == Difference(6, 0, 0.0, 0.0)
    assert difference(row, BytesTensor.from_objects(np.full((2, 3), "1", object)), Tolerance()).beyond == 6


def test_raw_elements_are_compared_as_bytes() -> None:
    one, other = np.array([b"\1\2", b"\3\4"], "V2"), np.array([b"\1\2", b"\3\5"], "V2")
    assert difference(one, other, Tolerance()) == Difference(2, 1, 1.0, 1.0)


def test_brain_floats_are_numbers() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    one, other = np.array([1.0, 2.0], ml_dtypes.bfloat16), np.array([1.0, 2.5], ml_dtypes.bfloat16)
    result = difference(one, other, Tolerance())
    assert (result.elements, result.beyond, result.largest) == (2, 1, 0.5)
    assert result.relative == pytest.approx(0.2)


def test_each_output_is_compared_and_added_up() -> None:
    found = compare({"x": np.ones(2), "y": np.ones(3)}, {"x": np.zeros(2)}, Tolerance())
    assert found == {"x": Difference(2, 2, 2.0, 1.0), "y": Difference(3, 3, 3.0, 0.0)}
    total = Difference()
    for each in found.values():
        total.add(each)
    assert total == Difference(5, 5, 5.0, 1.0)
