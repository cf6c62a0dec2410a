"""Strings that a model passes on are not encoded anew."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from headrace.messages.tensor import BytesTensor
from triton_python_backend_utils import wire_strings

ITEMS = [b"item %d" % number for number in range(5000)]


def received() -> pb_utils.Tensor:
    return pb_utils.Tensor._received("x", BytesTensor.from_items(ITEMS, (5, 1000)))


def sent(array: np.ndarray[tuple[int, ...], np.dtype[np.object_]]) -> BytesTensor:
    wire = pb_utils.Tensor("y", array)._wire()
    assert isinstance(wire, BytesTensor)
    return wire


def test_strings_passed_on_are_sent_in_the_form_in_which_they_came() -> None:
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


def test_nothing_is_kept_once_the_array_is_gone() -> None:
    array = received().as_numpy()
    assert len(wire_strings._decoded) == 1
    del array
    gc.collect()
    assert wire_strings._decoded == {}


def test_small_tensors_are_not_kept() -> None:
    array = pb_utils.Tensor._received("x", BytesTensor.from_items([b"a"], (1,))).as_numpy()
    assert array.tolist() == [b"a"]
    assert wire_strings._decoded == {}
