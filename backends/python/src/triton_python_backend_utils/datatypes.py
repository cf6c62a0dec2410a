"""Data types by Triton's numbers, Triton's names in a config, and NumPy's types.

Source: docs/spec/behaviours.md sections 3.1 and 9.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import DataType, dtypes

# BF16 is left out, as in Triton: NumPy has no such type.
_KNOWN = [dtype for dtype in dtypes.ALL if dtype is not dtypes.BF16]


def _scalar(dtype: DataType) -> type[Any]:
    return dtype.numpy.type


TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    dtype.config_name: bool if dtype is dtypes.BOOL else _scalar(dtype) for dtype in _KNOWN
}
_BY_NUMBER = {dtype.config_value: _scalar(dtype) for dtype in _KNOWN}
_BY_NUMPY = {dtype.numpy: dtype.config_value for dtype in _KNOWN} | {np.dtype(np.bytes_): dtypes.BYTES.config_value}


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """NumPy's type for ``TYPE_FP32``. Raises KeyError for an unknown name and for TYPE_BF16."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type[Any] | None:
    """NumPy's type for a number of `Tensor.triton_dtype`; None for one that NumPy lacks."""
    return _BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: npt.DTypeLike) -> int | None:
    """Triton's number for a type or a dtype of NumPy; None for one that Triton lacks, and for anything else."""
    try:
        return None if data_type is None else _BY_NUMPY.get(np.dtype(data_type))
    except TypeError:
        return None
