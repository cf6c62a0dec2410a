"""Tensors in traces: copied when they are seen, and written as text later."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headrace import BytesTensor, data_type

#: The data of a larger tensor is left out of a trace.
MOST_BYTES = 1 << 20


class CopiedTensor(NamedTuple):
    """A tensor as it was. ``data`` is None if it was left out."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def nbytes(self) -> int:
        """The bytes that it keeps; for strings, about."""
        return 0 if self.data is None else int(self.data.nbytes)


def copied(name: str, tensor: Any) -> CopiedTensor:
    """Return a copy of ``tensor``, which its owner may change later."""
    kind, shape = data_type(tensor).name, tuple(tensor.shape)
    if isinstance(tensor, BytesTensor):
        kept: Any = tensor.to_objects() if tensor.nbytes <= MOST_BYTES else None
    else:
        kept = np.array(tensor, copy=True) if tensor.nbytes <= MOST_BYTES else None
    return CopiedTensor(name, kind, shape, kept)


def text_of(tensor: CopiedTensor) -> str:
    """Return the elements of ``tensor`` as Triton writes them: with commas between, empty for FP16 and BF16."""
    if tensor.data is None or tensor.datatype in ("FP16", "BF16"):
        return ""
    values = tensor.data.ravel().tolist()
    if tensor.datatype == "BYTES":
        return ",".join(f'"{value.decode("utf-8", "replace")}"' for value in values)
    if tensor.datatype in ("FP32", "FP64"):
        return ",".join(f"{value:g}" for value in values)
    return ",".join(str(int(value)) for value in values)
