"""Tensors on a device, played by the host: their parts, and the one copy of them."""

from __future__ import annotations

import numpy as np

from headrace.messages import dtypes
from headrace.messages.device_tensor import StackedTensors, on_host
from headrace.messages.tensor import as_tensor, data_type
from headrace_testing.played_tensors import PlayedDeviceTensor

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_it_is_copied_to_the_host_once() -> None:
    tensor = PlayedDeviceTensor(X)
    assert tensor.to_host() is tensor.to_host()
    np.testing.assert_array_equal(np.asarray(tensor), X)
    assert tensor.copies == [(3, 4)]
    assert (tensor.nbytes, data_type(tensor)) == (48, dtypes.FP32)  # type: ignore[arg-type]  # it has what is asked


def test_parts_are_copied_alone_unless_the_whole_has_been() -> None:
    tensor = PlayedDeviceTensor(X)
    part, flat = tensor[1:3], tensor.reshape((12,))
    np.testing.assert_array_equal(part.to_host(), X[1:3])
    np.testing.assert_array_equal(flat.to_host(), X.reshape(-1))
    assert tensor.copies == [(2, 4), (12,)]
    whole = tensor.to_host()
    assert np.shares_memory(tensor[:2].to_host(), whole)
    assert np.shares_memory(tensor.reshape((4, 3))[1:2].reshape((3,)).to_host(), whole)
    assert len(tensor.copies) == 3


def test_consumer_without_device_tensors_gets_an_array() -> None:
    array = as_tensor(PlayedDeviceTensor(X))
    assert type(array) is np.ndarray
    stacked = StackedTensors([PlayedDeviceTensor(X), X[:1]])
    assert stacked.shape == (4, 4)
    np.testing.assert_array_equal(on_host(stacked), np.concatenate([X, X[:1]]))
    target = np.empty(stacked.shape, stacked.dtype)
    assert stacked.to_host(target) is target
    np.testing.assert_array_equal(target, np.concatenate([X, X[:1]]))
    assert on_host(X) is X
