"""Tensor data written as JSON, to tensors. The type rules are those of docs/spec/behaviours.md section 1.3."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from headrace.errors import InvalidArgument
from headrace.frontends.http.documents import MAX_DEPTH, malformed, too_deep, wrong_type
from headrace.frontends.http.outline import Pieces
from headrace.messages import dtypes
from headrace.messages.dtypes import DataType
from headrace.messages.request import Undecoded
from headrace.messages.tensor import BytesTensor, Tensor, wire_view


def to_tensor(data: Any, datatype: DataType, shape: tuple[int, ...], count: int) -> Tensor | Undecoded:
    """``data`` as a tensor of ``count`` elements in ``shape``; one copy.

    ``data`` is nested to any depth below `MAX_DEPTH` and read in row-major order; only its number
    of leaves must agree with the shape. Raises `InvalidArgument` with Triton's texts.
    """
    if type(data) is not list:
        if type(data) is Pieces:
            return _assembled(data, datatype, shape, count)
        raise wrong_type("data", "array", "array")
    leaves = data
    kinds = set(map(type, leaves))
    if list in kinds:
        leaves = _flatten(leaves)
        kinds = set(map(type, leaves))
    if len(leaves) != count:
        raise _wrong_count(len(leaves) > count, datatype)
    if datatype is dtypes.BYTES:
        return BytesTensor.from_items(_strings(leaves, kinds), shape)
    return _shaped(_numbers(leaves, kinds, datatype), datatype, shape)


def _assembled(pieces: Pieces, datatype: DataType, shape: tuple[int, ...], count: int) -> Tensor | Undecoded:
    """The tensor whose elements come in ``pieces``: what one is made of is gone before the next is read."""
    is_text, found = datatype is dtypes.BYTES, 0
    parts = list[Any]()
    numbers = np.empty(0 if is_text else count, datatype.numpy)
    for leaves in pieces.read():
        begin, found = found, found + len(leaves)
        if found > count:
            raise _wrong_count(True, datatype)
        kinds = set(map(type, leaves))
        if is_text:
            parts.append(BytesTensor.from_items(_strings(leaves, kinds), (len(leaves),)).buffer)
        else:
            numbers[begin:found] = _numbers(leaves, kinds, datatype)
    if found != count:
        raise _wrong_count(False, datatype)
    return BytesTensor(b"".join(parts), shape) if is_text else _shaped(numbers, datatype, shape)


def _shaped(numbers: np.ndarray[Any, np.dtype[Any]], datatype: DataType, shape: tuple[int, ...]) -> Tensor | Undecoded:
    try:
        return numbers.reshape(shape)
    except ValueError:  # more axes than NumPy has
        return Undecoded(datatype.name, shape, wire_view(numbers))


def _numbers(leaves: list[Any], kinds: set[type], datatype: DataType) -> np.ndarray[Any, np.dtype[Any]]:
    kind = datatype.numpy.kind
    try:
        if kind == "f" and kinds <= {float, int}:
            # array() rounds as a C cast does; NumPy would warn of values that become infinite.
            return np.frombuffer(array("f" if datatype is dtypes.FP32 else "d", leaves), datatype.numpy)
        if kind == "i" and kinds == {int}:
            return np.array(leaves, np.int64).astype(datatype.numpy, copy=False)
        if kind == "u" and kinds == {int} and min(leaves) >= 0:  # NumPy 1 would wrap a negative one
            return np.array(leaves, np.uint64).astype(datatype.numpy, copy=False)
    except OverflowError:
        raise _wrong_leaf(kind) from None
    if kind == "b" and kinds == {bool}:
        return np.array(leaves, np.bool_)
    raise _wrong_leaf(kind)


def _strings(leaves: list[Any], kinds: set[type]) -> list[bytes]:
    if kinds != {str}:
        raise malformed("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    return [leaf.encode("utf-8", "surrogatepass") for leaf in leaves]


def _flatten(nested: list[Any]) -> list[Any]:
    """The leaves in row-major order, in time linear in the document."""
    level, depth = nested, 1
    while (kinds := set(map(type, level))) == {list}:
        depth += 1
        if depth >= MAX_DEPTH:
            raise too_deep()
        level = list(chain.from_iterable(level))
    return list(_walk(level, depth)) if list in kinds else level


def _walk(nested: list[Any], depth: int) -> Iterator[Any]:
    """Depth first, for data whose nesting is not the same everywhere."""
    pending = [iter(nested)]
    while pending:
        for item in pending[-1]:
            if type(item) is list:
                pending.append(iter(item))
                break
            yield item
        else:
            pending.pop()
        if depth + len(pending) > MAX_DEPTH:
            raise too_deep()


def _wrong_count(too_many: bool, datatype: DataType) -> InvalidArgument:
    shape = "shape" if datatype is dtypes.BYTES or not too_many else "Shape"
    if too_many:
        return malformed(f"Unable to parse 'data': {shape} does not match true shape of 'data' field")
    return malformed(f"Failed to parse 'data' field: {shape} does not match true shape")


def _wrong_leaf(kind: str) -> InvalidArgument:
    name = {"b": "boolean", "u": "unsigned-integer", "i": "signed-integer"}.get(kind)
    return wrong_type("data", name, name) if name else wrong_type("data", "number", "double")
