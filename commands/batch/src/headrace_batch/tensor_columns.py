"""Columns to tensors, row by row where a column as a whole cannot be converted; and tensors to columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace import BytesTensor, InvalidArgument, Spec
from headrace_batch.arrow_types import SCALARS, column_type, is_list, is_scalar
from headrace_batch.row_files import Column

Array = npt.NDArray[Any]


class RowTensors:
    """The tensors of one input, one per row: an array if all have one shape, otherwise a list."""

    def __init__(self, rows: Array | Sequence[Array]) -> None:
        self._rows = rows

    @property
    def is_even(self) -> bool:
        """True if all rows have one shape."""
        return isinstance(self._rows, np.ndarray)

    def shape(self, row: int) -> tuple[int, ...]:
        return tuple(self._rows[row].shape)

    def stack(self, rows: Sequence[int]) -> Array:
        """Return the rows in one array; the shapes are alike. Consecutive rows of one array are a view."""
        first, last = rows[0], rows[-1]
        if isinstance(self._rows, np.ndarray) and last - first + 1 == len(rows):
            return self._rows[first : last + 1]
        return np.stack([self._rows[row] for row in rows])


def tensors_of(columns: Sequence[Column], spec: Spec, broken: dict[int, str]) -> RowTensors:
    """Return the tensors of ``spec`` for all rows. Add to ``broken`` why a row has none; its tensor is then zeros.

    Several columns are the elements of one tensor, in that order.
    """
    if len(columns) > 1:
        parts = [tensors_of([column], Spec(spec.name, spec.datatype, ()), broken) for column in columns]
        count = len(columns[0])
        stacked = np.stack([part.stack(range(count)) for part in parts], axis=1)
        return RowTensors(stacked.reshape(count, *_fitting(spec, len(columns))))
    (column,) = columns
    if isinstance(column, np.ndarray):
        return RowTensors(_from_array(column, spec))
    try:
        whole = column if isinstance(column, pa.Array) else pa.array(column)
        return RowTensors(_of_right_rows(whole, spec, broken) if broken else _from_arrow(whole, spec))
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        return _row_by_row(column, spec, broken)


def _of_right_rows(column: pa.Array, spec: Spec, broken: Collection[int]) -> Array:
    """Return ``[rows, *dims]``, with zeros in the ``broken`` rows. Raises as `_from_arrow`."""
    right = [row for row in range(len(column)) if row not in broken]
    found = _from_arrow(column.take(pa.array(right, pa.int64())), spec)
    whole = np.zeros((len(column), *found.shape[1:]), found.dtype)
    whole[right] = found
    return whole


def _row_by_row(column: Column, spec: Spec, broken: dict[int, str]) -> RowTensors:
    rows = []
    nothing = np.zeros([max(size, 0) for size in spec.dims], spec.datatype.numpy)
    for number, value in enumerate(column):
        if number in broken:
            rows.append(nothing)
            continue
        try:
            one = pa.array([value.as_py()], value.type) if isinstance(value, pa.Scalar) else pa.array([value])
            rows.append(_from_arrow(one, spec)[0])
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            broken[number] = f"input '{spec.name}': {error}"
            rows.append(nothing)
    return RowTensors(rows)


def _from_arrow(column: pa.Array, spec: Spec) -> Array:
    """Return ``[rows, *dims]``. Raises ValueError, or an error of Arrow that names the wrong value."""
    values, count = column, len(column)
    while is_list(values.type):
        if values.null_count:
            raise ValueError("a value is missing")
        values = values.flatten()
    if values.null_count:
        raise ValueError("a value is missing")
    sizes = len(values) // count if count else 0
    if any(size < 0 for size in spec.dims) and count > 1 and is_list(column.type):
        raise ValueError("rows may differ in shape")  # then each is converted by itself
    shape = _fitting(spec, sizes, np.shape(column[0].as_py()) if count == 1 and is_list(column.type) else None)
    if len(values) != count * prod(shape):
        raise ValueError("rows differ in size")
    return _numbers(values, spec).reshape(count, *shape)


def _numbers(values: pa.Array, spec: Spec) -> Array:
    """Return the elements in the data type of ``spec``. A value that it cannot hold is an error."""
    name = spec.datatype.name
    if name == "BYTES":
        text = values if pa.types.is_binary(values.type) else values.cast(pa.string())
        return np.array(text.to_pylist(), np.object_)
    if name in ("FP16", "BF16"):
        return np.asarray(values.cast(pa.float32()).to_numpy(zero_copy_only=False)).astype(spec.datatype.numpy)
    return np.asarray(values.cast(SCALARS[name]).to_numpy(zero_copy_only=False))


def _fitting(spec: Spec, elements: int, shape: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the shape of a row with this number of elements: its own ``shape`` if that fits. Raises ValueError."""
    dims = tuple(spec.dims)
    if shape is not None and len(shape) == len(dims) and all(d in (-1, s) for d, s in zip(dims, shape, strict=True)):
        return shape
    known = prod(size for size in dims if size >= 0)
    if dims.count(-1) == 1 and known and elements % known == 0:
        return tuple(elements // known if size < 0 else size for size in dims)
    if -1 not in dims and known == elements:
        return dims
    raise ValueError(f"it takes shape {list(dims)}; the row has {elements} elements")


def _from_array(array: Array, spec: Spec) -> Array:
    """Return a NumPy column in the form of ``spec``. Raises `InvalidArgument` if it does not fit, for all rows."""
    wanted = spec.datatype.numpy
    if array.dtype != wanted and not np.can_cast(array.dtype, wanted, "safe"):
        raise InvalidArgument(f"the array has {array.dtype}; input '{spec.name}' takes {spec.datatype.name}")
    try:
        shape = _fitting(spec, prod(array.shape[1:]), array.shape[1:])
    except ValueError as error:
        raise InvalidArgument(f"input '{spec.name}': {error}") from error
    found: Array = array.astype(wanted, copy=False).reshape(len(array), *shape)
    return found


def column_of(
    pieces: Sequence[tuple[Sequence[int], Array]], count: int, datatype: str, dims: Sequence[int]
) -> pa.Array:
    """Return a column of ``count`` rows. Each piece has some rows, and their tensors ``[rows, ...]``; rows in no piece
    are null.

    BYTES elements are text already.
    """
    kind = column_type(datatype, dims)
    if -1 in dims or not pieces:
        found = pa.array([each.tolist() for _, tensors in pieces for each in tensors], kind)
    else:
        flat = np.concatenate([tensors.reshape(-1) for _, tensors in pieces])
        found = pa.array(flat.astype(np.float32) if datatype == "BF16" else flat, SCALARS[datatype])
        for size in reversed(() if is_scalar(dims) else dims):
            found = pa.FixedSizeListArray.from_arrays(found, size)
    rows = [row for piece, _ in pieces for row in piece]
    if rows == list(range(count)):
        return found
    places = {row: place for place, row in enumerate(rows)}
    return found.take(pa.array([places.get(row) for row in range(count)], pa.int64()))


def decoded(tensor: Array | BytesTensor) -> Array:
    """Return an output as an array; BYTES as text. Raises UnicodeDecodeError."""
    if not isinstance(tensor, BytesTensor):
        return tensor
    return np.array([each.decode() for each in tensor.items()], np.object_).reshape(tensor.shape)
