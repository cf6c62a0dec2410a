"""Layouts of earlier requests: a request with a known layout need not be parsed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.messages.request import InferRequest, Parameter, Undecoded
from headrace.messages.tensor import BytesTensor, Tensor

#: A protocol keeps at most 1024 layouts, of requests with at most 1024 bytes besides their tensors.
LAYOUTS = 1024
FIXED_BYTES = 1024


class TensorRange(NamedTuple):
    """An input, and the range of its bytes in a body. ``dtype`` is None for strings."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic] | None
    begin: int
    end: int


class RequestLayout(NamedTuple):
    """The part that is equal in requests that differ only in their ids and the bytes of their tensors.

    A client that sends tensors of one shape sends such requests. The layout of the first is kept, and of the next ones
    only the tensors are read. The protocol decides whether a request has a layout.
    """

    ranges: Sequence[TensorRange]
    outputs: Sequence[str]
    parameters: Mapping[str, Parameter]
    #: The fields of `InferRequest` after the parameters. ``alike`` is None in a sequence.
    further: Sequence[Any]

    @classmethod
    def of(cls, request: InferRequest) -> RequestLayout | None:
        """Return the layout of ``request``, whose inputs are contiguous; None if it is unusual."""
        ranges, begin = [], 0
        for name, tensor in request.inputs.items():
            if isinstance(tensor, Undecoded) or not tensor.nbytes:
                return None
            end = begin + tensor.nbytes
            dtype = tensor.dtype if isinstance(tensor, np.ndarray) else None
            ranges.append(TensorRange(name, tensor.shape, dtype, begin, end))
            begin = end
        sequence = (request.sequence_id, request.sequence_start, request.sequence_end)
        is_checked_anew = request.is_in_sequence or any(each.dtype is None for each in ranges)
        return cls(
            ranges,
            tuple(request.outputs),
            dict(request.parameters),
            (request.priority, request.timeout_us, *sequence, (), None, False, None if is_checked_anew else object()),
        )

    def request(self, model: str, version: str, request_id: str, body: memoryview) -> InferRequest:
        """Return the request to ``model`` in ``body``. Its inputs are views on ``body``."""
        ranges, outputs, parameters, further = self
        inputs: dict[str, Tensor | Undecoded] = {}
        for name, shape, dtype, begin, end in ranges:
            if dtype is None:
                inputs[name] = BytesTensor(body[begin:end], shape)
            else:
                inputs[name] = np.ndarray(shape, dtype, body, begin)
        # The parameters are copied, because a model may change them.
        return InferRequest(model, inputs, outputs, request_id, version, {**parameters}, *further)
