"""The classification extension: an output as its top classes (docs/spec/behaviours.md section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import InvalidArgument
from headrace.messages.tensor import BytesTensor, Tensor, data_type

#: At most this many elements per item are ranked.
MAX_ELEMENTS = 1_000_000
#: This many strings are created at a time: joining a million would hold the interpreter's lock too long.
_SLICE = 8192
_UNRANKED = ("FP16", "BF16", "BOOL", "BYTES")


def classify(tensor: Tensor, count: int, labels: Sequence[str], is_batched: bool) -> BytesTensor:
    """Return the ``count`` highest elements of each item as strings ``<score>:<index>[:<label>]``.

    ``tensor`` is one item, or with ``is_batched`` one per row. The result has shape [k], or [rows, k], with k =
    min(count, elements per item), in descending order; of equal elements, the lower index is first. Raises
    `InvalidArgument` for data types without an order, and for more than `MAX_ELEMENTS`.
    """
    datatype = data_type(tensor).name
    if isinstance(tensor, BytesTensor) or datatype in _UNRANKED:
        raise InvalidArgument(f"class result not available for output due to unsupported type '{datatype}'")
    batch = tensor.shape[:1] if is_batched else ()
    elements = prod(tensor.shape[len(batch) :])
    if elements > MAX_ELEMENTS:
        raise InvalidArgument("classification output tensor too large")
    k = min(count, elements)
    buffer, strings = bytearray(), list[bytes]()
    for item in tensor.reshape(prod(batch), elements) if elements else ():
        order = _descending(item, k)
        for begin in range(0, k, _SLICE):
            strings += _worded(item, order[begin : begin + _SLICE], labels)
            if len(strings) >= _SLICE:
                buffer += BytesTensor.from_items(strings, (len(strings),)).buffer
                strings.clear()
    last = BytesTensor.from_items(strings, (*batch, k))
    if not buffer:
        return last
    buffer += last.buffer
    return BytesTensor(buffer, (*batch, k))


def _worded(item: npt.NDArray[Any], order: npt.NDArray[np.intp], labels: Sequence[str]) -> list[bytes]:
    indices = order.tolist()
    pattern = "%.6f:%d" if item.dtype.kind == "f" else "%d:%d"
    scored = [pattern % pair for pair in zip(item[order].tolist(), indices, strict=True)]
    return [_labelled(text, index, labels) for text, index in zip(scored, indices, strict=True)]


def _labelled(text: str, index: int, labels: Sequence[str]) -> bytes:
    label = labels[index] if index < len(labels) else ""
    return (f"{text}:{label}" if label else text).encode()


def _descending(item: npt.NDArray[Any], k: int) -> npt.NDArray[np.intp]:
    """Return the indices of the ``k`` highest. NaN ranks lowest. Linear in ``item`` as long as k is small."""
    if item.dtype.kind == "f":
        item = np.where(np.isnan(item), -np.inf, item)
    if k > len(item) // 8:
        return _sorted(item)[:k]
    least = np.partition(item, len(item) - k)[len(item) - k]
    above = np.flatnonzero(item > least)
    chosen = np.sort(np.append(above, np.flatnonzero(item == least)[: k - len(above)]))
    order: npt.NDArray[np.intp] = chosen[_sorted(item[chosen])]
    return order


def _sorted(item: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Return all indices, that of the highest element first."""
    # Stable and reversed twice, because negation would overflow for the smallest integer.
    order: npt.NDArray[np.intp] = len(item) - 1 - np.argsort(item[::-1], kind="stable")[::-1]
    return order
