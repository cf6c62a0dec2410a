"""Tensors of the v2 protocol as flat NumPy arrays: from JSON, and from their bytes (docs/spec: binary data)."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

#: Datatypes of fixed size. BF16 is stored as FP32.
_NUMBERS = {
    "BOOL": "?", "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
#: Datatypes that JSON does not carry.
BINARY_ONLY = ("FP16", "BF16")


class BadTensor(ValueError):
    """A tensor that is not of its datatype and shape."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor: ``values`` is flat; for BYTES an array of objects of type bytes, for BF16 of FP32."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: np.ndarray[Any, Any]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> NamedTensor:
        """Return the tensor of an element of ``inputs`` or ``outputs``. Raises `BadTensor`."""
        try:
            name, datatype, shape = document["name"], document["datatype"], tuple(map(int, document["shape"]))
            flat = _flat(document["data"])
            if datatype == "BYTES":
                values = _objects([each.encode() if isinstance(each, str) else str(each).encode() for each in flat])
            elif datatype == "BF16":
                values = np.array(flat, np.float32)
            else:
                values = np.array(flat, _NUMBERS[datatype])
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
            raise BadTensor(f"no tensor: {type(error).__name__}: {error}") from error
        return cls(str(name), str(datatype), shape, values)

    @classmethod
    def from_bytes(cls, name: str, datatype: str, shape: Sequence[int], data: bytes) -> NamedTensor:
        """Return the tensor with ``data`` as the protocol sends it. Raises `BadTensor`."""
        try:
            if datatype == "BYTES":
                values = _objects(_strings(data))
            elif datatype == "BF16":
                values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(data, _NUMBERS[datatype])
        except (LookupError, ValueError, struct.error) as error:
            raise BadTensor(f"'{name}' has {len(data)} bytes that are no {datatype}: {error}") from error
        return cls(name, datatype, tuple(map(int, shape)), values)

    def wire_bytes(self) -> bytes:
        """Return the bytes as the protocol sends them."""
        if self.datatype == "BYTES":
            return b"".join(struct.pack("<I", len(each)) + each for each in self.values)
        if self.datatype == "BF16":
            return (self.values.view(np.uint32) >> 16).astype("<u2").tobytes()
        return self.values.tobytes()

    @property
    def is_whole(self) -> bool:
        """True if the number of values fits the shape."""
        return len(self.values) == prod(self.shape)


def content_of(document: Any) -> Any:
    """Return the data of an element of perf_analyzer's file: a list, ``{"content": ...}`` or ``{"b64": ...}``."""
    if isinstance(document, dict) and "b64" in document:
        return base64.b64decode(document["b64"], validate=True)
    return document.get("content") if isinstance(document, dict) else document


def _flat(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError(f"'data' is no array: {str(data)[:40]}")
    flat: list[Any] = data
    while flat and isinstance(flat[0], list):
        flat = [each for row in flat for each in row]
    return flat


def _objects(values: Sequence[bytes]) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _strings(data: bytes) -> list[bytes]:
    found, at = list[bytes](), 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if at + 4 + size > len(data):
            raise ValueError("a string is longer than the rest")
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return found
