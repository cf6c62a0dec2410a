"""Layouts of earlier requests: a request with a known layout need not be parsed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
    priority: int
    timeout_us: int
    #: Its id, and whether the request starts and ends it; None without a sequence.
    sequence: tuple[int | str, bool, bool] | None
    #: `InferRequest.alike` of these requests.
    alike: object

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
        return cls(
            ranges,
            tuple(request.outputs),
            dict(request.parameters),
            request.priority,
            request.timeout_us,
            sequence if request.is_in_sequence else None,
            None if any(each.dtype is None for each in ranges) else object(),
        )

    def request(self, model: str, version: str, request_id: str, body: memoryview) -> InferRequest:
        """Return the request to ``model`` in ``body``. Its inputs are views on ``body``."""
        inputs: dict[str, Tensor | Undecoded] = {}
        for name, shape, dtype, begin, end in self.ranges:
            if dtype is None:
                inputs[name] = BytesTensor(body[begin:end], shape)
            else:
                inputs[name] = np.ndarray(shape, dtype, body, begin)
        parameters = {**self.parameters}  # a copy, because a model may change it
        if self.sequence is None:
            priority, timeout_us, alike = self.priority, self.timeout_us, self.alike
            return InferRequest(
                model, inputs, self.outputs, request_id, version, parameters, priority, timeout_us, alike=alike
            )
        return InferRequest(
            model, inputs, self.outputs, request_id, version, parameters, self.priority, self.timeout_us, *self.sequence
        )
