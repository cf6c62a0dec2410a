"""Strings that a model passes on as it got them: found again in wire form, instead of encoded anew.

Many models hand a text through. Encoding a million strings takes a quarter of a second, seeing that
they are the same a hundredth: lists compare by identity first.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import BytesTensor

#: Elements from which on it is worth a look.
_WORTH = 4096


@dataclass(frozen=True, slots=True)
class _Decoded:
    array: weakref.ref[npt.NDArray[Any]]
    items: list[bytes]
    wire: BytesTensor


#: By the identity of their arrays, for as long as those live.
_decoded: dict[int, _Decoded] = {}


def decode(wire: BytesTensor) -> npt.NDArray[Any]:
    """The strings of ``wire`` in an object array of its shape. A large one keeps ``wire`` alive."""
    items = wire.items()
    flat = np.empty(len(items), np.object_)
    flat[:] = items
    array = flat.reshape(wire.shape)
    if len(items) >= _WORTH:
        key = id(array)
        _decoded[key] = _Decoded(weakref.ref(array, lambda _: _decoded.pop(key, None)), items, wire)
    return array


def encode(array: npt.NDArray[Any]) -> BytesTensor:
    """``array`` in wire form; text is UTF-8."""
    known = _decoded.get(id(array))
    if known is not None and known.array() is array and array.ravel().tolist() == known.items:
        return known.wire.reshape(array.shape)
    return BytesTensor.from_objects(array)
