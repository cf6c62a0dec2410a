"""The data types of the v2 protocol, and tables to find one by its names or its NumPy dtype.

Source: docs/spec/behaviours.md section 3.1. A `DataType` has a name in the protocol (``FP32``), a name and a number in
a config (``TYPE_FP32``), and a NumPy dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

try:
    from ml_dtypes import bfloat16
except ImportError:  # optional: in an environment without it, an element is two raw bytes
    bfloat16 = "V2"
#: True if NumPy can compute with arrays of BF16.
HAS_BFLOAT16 = bfloat16 != "V2"


@dataclass(frozen=True, slots=True, eq=False)
class DataType:
    """One data type. ``itemsize`` is in bytes; 0 for ``BYTES``, whose elements vary in size.

    Compared by identity: the fourteen below are the only instances.
    """

    name: str
    config_name: str
    config_value: int
    numpy: np.dtype[np.generic]
    itemsize: int

    def __str__(self) -> str:
        return self.name


def _data_type(name: str, value: int, numpy: npt.DTypeLike) -> DataType:
    dtype = np.dtype(numpy)
    if name == "BYTES":
        return DataType(name, "TYPE_STRING", value, dtype, 0)
    return DataType(name, f"TYPE_{name}", value, dtype, dtype.itemsize)


BOOL = _data_type("BOOL", 1, np.bool_)
UINT8 = _data_type("UINT8", 2, np.uint8)
UINT16 = _data_type("UINT16", 3, np.uint16)
UINT32 = _data_type("UINT32", 4, np.uint32)
UINT64 = _data_type("UINT64", 5, np.uint64)
INT8 = _data_type("INT8", 6, np.int8)
INT16 = _data_type("INT16", 7, np.int16)
INT32 = _data_type("INT32", 8, np.int32)
INT64 = _data_type("INT64", 9, np.int64)
FP16 = _data_type("FP16", 10, np.float16)
FP32 = _data_type("FP32", 11, np.float32)
FP64 = _data_type("FP64", 12, np.float64)
BYTES = _data_type("BYTES", 13, np.object_)
BF16 = _data_type("BF16", 14, bfloat16)

ALL = (BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, FP32, FP64, BYTES, BF16)

BY_NAME = {dtype.name: dtype for dtype in ALL}
BY_CONFIG_NAME = {dtype.config_name: dtype for dtype in ALL}
BY_CONFIG_VALUE = {dtype.config_value: dtype for dtype in ALL}
BY_NUMPY = {dtype.numpy: dtype for dtype in ALL}
