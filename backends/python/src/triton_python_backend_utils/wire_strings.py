"""Strings in the wire form of the protocol, length words and bytes (docs/spec/behaviours.md section 3.1).

Strings that a model passes on as it got them are found again in wire form, instead of encoded anew: many models hand
a text through. Encoding a million strings takes a quarter of a second, seeing that they are the same a hundredth:
lists compare by identity first.
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


def serialize_byte_tensor(input_tensor: npt.NDArray[Any]) -> bytes | tuple[()] | None:
    """The elements of an array of objects or bytes in wire form, row by row; text as UTF-8.

    ``()`` for an array without elements and None for one of another type, as Triton has it.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return bytes(BytesTensor.from_objects(input_tensor).buffer)


def deserialize_bytes_tensor(
    encoded_tensor: bytes | bytearray | memoryview | npt.NDArray[Any],
) -> npt.NDArray[np.object_]:
    """The strings of ``encoded_tensor`` as ``bytes``, in an object array of one dimension.

    Raises `headrace.errors.InvalidArgument` for what is no wire form.
    """
    tensor = BytesTensor(np.frombuffer(encoded_tensor, np.uint8).data, ())
    return tensor.reshape((len(tensor.offsets) - 1,)).to_objects()
