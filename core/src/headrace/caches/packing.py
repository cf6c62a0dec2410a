"""A response as bytes, for caches outside of the process::

    magic "HRC1" | header length u32 | header, JSON | tensors in wire form, each at a multiple of 16 bytes

The header has ``parameters``, and the name, data type, shape and size of each of the ``outputs``. The bytes to unpack
may come from anyone: unpacking uses memory in proportion to their size, and executes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from headrace.caches.base import CachedResponse
from headrace.errors import InvalidArgument
from headrace.messages import dtypes
from headrace.messages.tensor import BytesTensor, Tensor, data_type, wire_bytes

_MAGIC = b"HRC1"
#: The most axes that every version of NumPy supports.
_MOST_AXES = 32
_ALIGN = 16
_MOST_HEADER_BYTES = 1 << 20


def pack_response(response: CachedResponse) -> bytes:
    """Return ``response`` as bytes for `unpack_response`. Copies every tensor once."""
    outputs, parts, place = [], [], 0
    for name, tensor in response.outputs.items():
        content = wire_bytes(tensor)
        size = len(content)
        outputs.append([name, data_type(tensor).name, list(tensor.shape), size])
        parts += [content, bytes(-size % _ALIGN)]
        place += size + -size % _ALIGN
    header = json.dumps({"outputs": outputs, "parameters": dict(response.parameters)}).encode()
    header += b" " * (-(len(header) + 8) % _ALIGN)
    return b"".join([_MAGIC, len(header).to_bytes(4, "little"), header, *parts])


def unpack_response(data: bytes) -> CachedResponse:
    """Return the response that `pack_response` packed as ``data``; its tensors are views of ``data``. Raises
    `InvalidArgument` for anything else."""
    try:
        return _unpack(data)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise InvalidArgument(f"{len(data)} bytes are not a packed response: {error}") from None


def _unpack(data: bytes) -> CachedResponse:
    size = int.from_bytes(data[4:8], "little")
    if data[:4] != _MAGIC or not 0 < size <= min(len(data) - 8, _MOST_HEADER_BYTES):
        raise ValueError("it has no header")
    header, place = json.loads(data[8 : 8 + size]), 8 + size
    outputs: dict[str, Tensor] = {}
    for name, datatype, shape, nbytes in header["outputs"]:
        if not isinstance(name, str) or name in outputs:
            raise ValueError("an output has no name, or the name of another output")
        outputs[name] = _tensor(data, place, datatype, _whole(shape), *_whole([nbytes]))
        place += nbytes + -nbytes % _ALIGN
    if place != len(data):
        raise ValueError(f"its outputs end at {place}")
    return CachedResponse(outputs, _parameters(header["parameters"]), len(data))


def _tensor(data: bytes, place: int, datatype: str, shape: tuple[int, ...], size: int) -> Tensor:
    if place + size > len(data):
        raise ValueError("an output runs past the end")
    kind = dtypes.BY_NAME[datatype]
    if kind is dtypes.BYTES:
        strings = BytesTensor(memoryview(data)[place : place + size], shape)
        try:
            count = len(strings.offsets) - 1
        except InvalidArgument as error:
            raise ValueError(error.message) from None
        if count != prod(shape):
            raise ValueError(f"{count} strings for shape {list(shape)}")
        return strings
    if prod(shape) * kind.itemsize != size:
        raise ValueError(f"{size} bytes for {datatype} {list(shape)}")
    array: Tensor = np.ndarray(shape, kind.numpy, data, place)
    return array


def _whole(numbers: Any) -> tuple[int, ...]:
    """Return ``numbers`` as a tuple. Raises `ValueError` unless they are at most 32 integers from 0 to 2**63 - 1."""
    if not isinstance(numbers, list) or len(numbers) > _MOST_AXES:
        raise ValueError("a shape is not a list, or too long")
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError("a shape or a size is not an integer from 0 to 2**63 - 1")
    return tuple(numbers)


def _parameters(parameters: Any) -> dict[str, str | int | bool | float]:
    if not isinstance(parameters, dict):
        raise ValueError("its parameters are not strings, numbers and booleans by name")
    check_parameters(parameters)
    return parameters


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a parameter of a response cannot be sent over every protocol."""
    for name, value in parameters.items():
        if not isinstance(value, str | int | bool | float):
            raise ValueError("its parameters are not strings, numbers and booleans by name")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"parameter {name!a} is an integer of more than 64 bits")
        try:
            name.encode()
            str(value).encode()
        except UnicodeEncodeError:
            raise ValueError(f"parameter {name!a} has half of a surrogate pair") from None
