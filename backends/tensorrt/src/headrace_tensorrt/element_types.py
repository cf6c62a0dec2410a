"""The element types of TensorRT as data types of the protocol."""

from __future__ import annotations

from collections.abc import Mapping

from headrace import DataType, dtypes

#: TensorRT's names of element types, and ours. FP8, INT4, FP4 and E8M0 are not in the protocol.
ELEMENT_TYPES: Mapping[str, DataType] = {
    "FLOAT": dtypes.FP32,
    "HALF": dtypes.FP16,
    "BF16": dtypes.BF16,
    "INT8": dtypes.INT8,
    "INT32": dtypes.INT32,
    "INT64": dtypes.INT64,
    "BOOL": dtypes.BOOL,
    "UINT8": dtypes.UINT8,
}
