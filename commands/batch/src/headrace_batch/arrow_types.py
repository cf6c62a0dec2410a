"""Arrow's types for the data types of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

#: The data types of models by name. BF16 has no type in Arrow: its values are written as FP32.
SCALARS: dict[str, pa.DataType] = {
    "BOOL": pa.bool_(),
    "UINT8": pa.uint8(),
    "UINT16": pa.uint16(),
    "UINT32": pa.uint32(),
    "UINT64": pa.uint64(),
    "INT8": pa.int8(),
    "INT16": pa.int16(),
    "INT32": pa.int32(),
    "INT64": pa.int64(),
    "FP16": pa.float16(),
    "BF16": pa.float32(),
    "FP32": pa.float32(),
    "FP64": pa.float64(),
    "BYTES": pa.string(),
}


def column_type(datatype: str, dims: Sequence[int]) -> pa.DataType:
    """Return the type of a column with a tensor of ``dims`` in each row; -1 is any size.

    A tensor of one element is a plain value. Others are lists in lists, of a fixed size where the size is known.
    """
    found = SCALARS[datatype]
    if is_scalar(dims):
        return found
    for size in reversed(dims):
        found = pa.list_(found, size) if size >= 0 else pa.list_(found)
    return found


def is_scalar(dims: Sequence[int]) -> bool:
    """True if a tensor of ``dims`` has one element."""
    return all(size == 1 for size in dims)


def is_list(kind: Any) -> bool:
    """True for every kind of list."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
