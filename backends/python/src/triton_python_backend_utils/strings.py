"""Strings in the wire form of the protocol: length words and bytes (docs/spec/behaviours.md section 3.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import BytesTensor


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
