"""What is kept of a response: copies that nobody can write into, and how much memory they take."""

from __future__ import annotations

from collections.abc import Iterable
from sys import getsizeof
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.caches.base import CachedResponse
from headrace.messages.response import InferResponse
from headrace.messages.tensor import BytesTensor, Tensor

#: What an entry takes beside its tensors: its key, its place in a cache, its dictionaries. And each output, beside its
#: bytes: an array and its shape. Measured by a test.
_ENTRY_BYTES, _OUTPUT_BYTES = 670, 350


def content_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of ``tensors``."""
    return sum([tensor.nbytes for tensor in tensors])


def own(response: InferResponse) -> CachedResponse:
    """A copy of what ``response`` says: no buffer that was received, and none of the model's, is kept alive by it."""
    outputs = {name: _own(tensor) for name, tensor in response.outputs.items()}
    parameters = dict(response.parameters)
    size = _ENTRY_BYTES + sum(getsizeof(name) + getsizeof(value) for name, value in parameters.items())
    for name, tensor in outputs.items():
        size += _OUTPUT_BYTES + getsizeof(name) + tensor.nbytes
        if isinstance(tensor, BytesTensor):
            size += 8 * (tensor.size + 1)  # its offsets, once somebody has looked for them
    return CachedResponse(outputs, parameters, size)


def lent(response: InferResponse) -> CachedResponse:
    """What ``response`` says, for others to read: its own tensors."""
    outputs = {name: _lent(tensor) for name, tensor in response.outputs.items()}
    return CachedResponse(outputs, dict(response.parameters))


def _own(tensor: Tensor) -> Tensor:
    if isinstance(tensor, BytesTensor):
        return BytesTensor(bytes(tensor.buffer), tensor.shape)
    fixed: Tensor = np.ndarray(tensor.shape, tensor.dtype, tensor.tobytes())  # over bytes, which never change
    return fixed


def _lent(tensor: Tensor) -> Tensor:
    if isinstance(tensor, BytesTensor):
        return tensor
    view: npt.NDArray[Any] = tensor.view()
    view.flags.writeable = False
    return view
