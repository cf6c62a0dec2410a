"""How long tensors of other engines are kept alive. Events and streams are simulated, without a GPU."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from headrace import StackedTensors
from headrace_testing.played_tensors import PlayedDeviceTensor
from headrace_torch import torch_tensors
from headrace_torch.torch_tensors import Borrowing, TorchTensor

X = np.arange(8, dtype=np.float32).reshape(2, 4)


class Stream:
    """Its work is complete when a test sets ``done``."""

    done = False

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return self.done


def new_result() -> TorchTensor:
    return TorchTensor(torch.zeros(2, 4), X.dtype)


def borrowed(borrowing: Borrowing, stream: Any) -> tuple[weakref.ref[Any], TorchTensor]:
    """Execute with a tensor of another engine. Return a reference to it, and the result."""
    tensor = PlayedDeviceTensor(X.copy())
    reference, result = weakref.ref(tensor.memory), new_result()
    borrowing.add(StackedTensors([X, tensor]))
    borrowing.keep(stream, [result, X])
    return reference, result


def test_a_tensor_is_kept_as_long_as_a_result_of_it() -> None:
    stream = Stream()
    reference, result = borrowed(Borrowing(), stream)
    part: Any = result[1:]
    del result
    assert reference() is not None
    stream.done = True  # a reader of the result has waited for the stream
    del part
    assert reference() is None
    assert not torch_tensors._unread


def test_a_tensor_whose_result_is_dropped_unread_is_kept_until_the_kernels_are_done() -> None:
    stream, borrowing = Stream(), Borrowing()
    reference, result = borrowed(borrowing, stream)
    del result
    assert reference() is not None
    borrowing.keep(stream, [])
    assert reference() is not None
    stream.done = True
    borrowing.keep(stream, [])
    assert reference() is None


def test_pytorchs_own_tensors_and_arrays_are_not_kept() -> None:
    borrowing, result = Borrowing(), new_result()
    own = new_result()
    borrowing.add(own)
    borrowing.add(StackedTensors([own, X]))
    borrowing.keep(Stream(), [result])
    assert result.borrowed is None
