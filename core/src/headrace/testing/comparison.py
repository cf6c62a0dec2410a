"""Are two answers the same?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.messages import dtypes
from headrace.messages.tensor import BytesTensor, Tensor, data_type

_FLOATS = (dtypes.FP16, dtypes.BF16, dtypes.FP32, dtypes.FP64)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str) -> None:
    """Fail unless ``found`` has the outputs ``expected``, with their data types, shapes and values.

    ``what`` begins the message. Every output that is found must be expected.
    """
    assert sorted(found) == sorted(expected), f"{what}: outputs {sorted(found)} instead of {sorted(expected)}"
    for name, tensor in expected.items():
        _assert_same(found[name], tensor, tolerance, f"{what}: output '{name}'")


def _assert_same(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    types = data_type(found), data_type(expected)
    assert types[0] is types[1], f"{what} is {types[0]} instead of {types[1]}"
    shapes = list(found.shape), list(expected.shape)
    assert shapes[0] == shapes[1], f"{what} has shape {shapes[0]} instead of {shapes[1]}"
    if isinstance(found, BytesTensor) or isinstance(expected, BytesTensor):
        assert _items(found) == _items(expected), f"{what} has other strings than expected"
    elif types[0] in _FLOATS:
        wide = np.asarray(found).astype(np.float64), np.asarray(expected).astype(np.float64)
        np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance, err_msg=what)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=what)


def _items(tensor: Tensor) -> list[bytes]:
    assert isinstance(tensor, BytesTensor)
    return tensor.items()
