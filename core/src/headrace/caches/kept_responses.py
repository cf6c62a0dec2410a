"""Makes the `CachedResponse` of a response: read-only copies or views of its tensors, and their size."""

from __future__ import annotations

from collections.abc import Iterable
from sys import getsizeof
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.caches.base import CachedResponse
from headrace.messages.response import InferResponse
from headrace.messages.tensor import BytesTensor, Tensor

#: The memory of an entry beside its tensors (key, cache slot, dictionaries), and of an output beside its bytes (array
#: and shape). Measured by a test.
_ENTRY_BYTES, _OUTPUT_BYTES = 670, 350


def content_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of ``tensors`` together."""
    return sum([tensor.nbytes for tensor in tensors])


def own(response: InferResponse) -> CachedResponse:
    """Return a copy of ``response``. It keeps no receive buffer and no buffer of the model alive."""
    outputs = {name: _own(tensor) for name, tensor in response.outputs.items()}
    parameters = dict(response.parameters)
    size = _ENTRY_BYTES + sum(getsizeof(name) + getsizeof(value) for name, value in parameters.items())
    for name, tensor in outputs.items():
        size += _OUTPUT_BYTES + getsizeof(name) + tensor.nbytes
        if isinstance(tensor, BytesTensor):
            size += 8 * (tensor.size + 1)  # its offsets, once they have been computed
    return CachedResponse(outputs, parameters, size)


def lent(response: InferResponse) -> CachedResponse:
    """Return ``response`` without a copy: with read-only views of its own tensors."""
    outputs = {name: _lent(tensor) for name, tensor in response.outputs.items()}
    return CachedResponse(outputs, dict(response.parameters))


def _own(tensor: Tensor) -> Tensor:
    if isinstance(tensor, BytesTensor):
        return BytesTensor(bytes(tensor.buffer), tensor.shape)
    fixed: Tensor = np.ndarray(tensor.shape, tensor.dtype, tensor.tobytes())  # over a bytes object, which is immutable
    return fixed


def _lent(tensor: Tensor) -> Tensor:
    if isinstance(tensor, BytesTensor):
        return tensor
    view: npt.NDArray[Any] = tensor.view()
    view.flags.writeable = False
    return view
