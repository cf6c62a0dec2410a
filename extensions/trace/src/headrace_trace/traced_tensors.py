"""Tensors in traces: copied at once, and written as text later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from headrace import BytesTensor, DeviceTensor, HeadraceError, data_type

#: The data of a larger tensor is left out of a trace.
MAX_BYTES = 1 << 20
_TENSORS: tuple[Any, ...] = (np.ndarray, BytesTensor, DeviceTensor)


class CopiedTensor(NamedTuple):
    """A tensor as it was. ``data`` is an array or a `BytesTensor`; None if it was left out."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def nbytes(self) -> int:
        """The bytes that it keeps."""
        return 0 if self.data is None else int(self.data.nbytes)


def copied(tensors: Mapping[str, Any]) -> list[CopiedTensor]:
    """Return copies of ``tensors``, whose owner may change them later. Inputs that can not be decoded are left out.

    A tensor on a device is copied to the host, which blocks the event loop.
    """
    return [
        CopiedTensor(name, data_type(tensor).name, tuple(tensor.shape), _data_of(tensor))
        for name, tensor in tensors.items()
        if isinstance(tensor, _TENSORS)
    ]


def _data_of(tensor: Any) -> Any:
    if tensor.nbytes > MAX_BYTES:
        return None
    if isinstance(tensor, BytesTensor):
        return BytesTensor(bytes(tensor.buffer), tensor.shape)
    return np.array(tensor, copy=True)


def text_of(tensor: CopiedTensor) -> str:
    """Return the elements of ``tensor`` as Triton writes them: with commas between, empty for FP16 and BF16.

    Strings are empty if they are malformed, too.
    """
    if tensor.data is None or tensor.datatype in ("FP16", "BF16"):
        return ""
    if isinstance(tensor.data, BytesTensor):
        try:
            return ",".join(f'"{value.decode("utf-8", "replace")}"' for value in tensor.data.items())
        except HeadraceError:
            return ""
    values = tensor.data.ravel().tolist()
    if tensor.datatype in ("FP32", "FP64"):
        return ",".join(f"{value:g}" for value in values)
    return ",".join(str(int(value)) for value in values)
