"""What a model takes and gives, compiled once at load into checks that run per request.

`Signature.check` is the fast yes: a straight line over the inputs that accepts what fits. When
something does not fit, `headrace.models.refusal` walks the same rules in Triton's order and
words the error (docs/spec/behaviours.md section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import InvalidArgument
from headrace.messages import dtypes
from headrace.messages.spec import Spec
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import Ticket
from headrace.models import refusal


class Signature:
    """The inputs and outputs of one model version.

    ``inputs`` and ``outputs`` are in config order; their dims exclude the batch axis.
    """

    def __init__(self, name: str, config: ModelConfig) -> None:
        self.name = name
        self.max_batch_size = config.max_batch_size
        self.batched = config.max_batch_size > 0
        self._most_rows = config.max_batch_size if self.batched else 1
        self.inputs = {io.name: Spec.from_config(io) for io in config.input}
        self.outputs = {io.name: Spec.from_config(io) for io in config.output}
        self.required = sum(not spec.optional for spec in self.inputs.values())
        self._has_optional = self.required < len(self.inputs)
        self._checks = {name: _Check.compile(spec, self.batched) for name, spec in self.inputs.items()}
        self._has_key = self._has_optional or any(check.is_variable for check in self._checks.values())
        self._reshaped = tuple(spec for spec in self.inputs.values() if spec.reshape is not None)

    def check(self, ticket: Ticket) -> None:
        """Accept the request of ``ticket`` and set ``rows`` and ``batch_key``, or raise `InvalidArgument`.

        Applies the config's input reshapes, which replace the request by one with other views.
        """
        request = ticket.request
        inputs, checks = request.inputs, self._checks
        rows = -1
        fits = self.required <= len(inputs) <= len(checks) and (not request.outputs or self._knows(request.outputs))
        if fits:
            for name, tensor in inputs.items():
                found = checks[name].rows(tensor) if name in checks else -1
                if found < 0 or (found != rows and rows >= 0):
                    fits = False
                    break
                rows = found
        if not fits or rows > self._most_rows or (self._has_optional and self._lacks(inputs)):
            raise refusal.explain(self, request)
        ticket.rows = rows if rows >= 0 else 1
        if self._has_key:
            ticket.batch_key = self._key(inputs)
        if self._reshaped:
            reshaped = {
                spec.name: _reshape(inputs[spec.name], spec, self.batched)
                for spec in self._reshaped
                if spec.name in inputs
            }
            ticket.request = request.with_inputs({**inputs, **reshaped})

    def wire_shape(self, spec: Spec) -> tuple[int, ...]:
        """The dims as metadata shows them: with -1 in front when the model batches."""
        return (-1, *spec.dims) if self.batched else spec.dims

    def _knows(self, names: Sequence[str]) -> bool:
        """Whether ``names`` are outputs of this model, each named once."""
        return all(name in self.outputs for name in names) and len(set(names)) == len(names)

    def _lacks(self, inputs: Mapping[str, Any]) -> bool:
        return any(not spec.optional and name not in inputs for name, spec in self.inputs.items())

    def _key(self, inputs: Mapping[str, Any]) -> tuple[object, ...]:
        """Requests stack only if they give the same inputs with the same variable dims."""
        return tuple([(name, tensor.shape[1:]) for name, tensor in sorted(inputs.items())])


@dataclass(slots=True, frozen=True)
class _Check:
    """One input's data type and shape. ``numpy`` is None for strings; ``dims`` exclude the batch axis."""

    numpy: np.dtype[Any] | None
    dims: tuple[int, ...]
    is_variable: bool
    batched: bool

    @classmethod
    def compile(cls, spec: Spec, batched: bool) -> _Check:
        numpy = None if spec.datatype is dtypes.BYTES else spec.datatype.numpy
        return cls(numpy, spec.dims, -1 in spec.dims, batched)

    def rows(self, tensor: Any) -> int:
        """The rows of ``tensor``, 1 for a model without batch axis; -1 if it does not fit."""
        if self.numpy is None:
            if type(tensor) is not BytesTensor or not _is_complete(tensor):
                return -1
        elif type(tensor) is not np.ndarray or (tensor.dtype is not self.numpy and tensor.dtype != self.numpy):
            return -1
        shape = tensor.shape
        dims = shape[1:] if self.batched else shape
        if dims != self.dims and not (self.is_variable and _match(self.dims, dims)):
            return -1
        return (shape[0] if shape else -1) if self.batched else 1


def _match(wanted: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(wanted) == len(dims) and all(want in (-1, got) for want, got in zip(wanted, dims, strict=True))


def _is_complete(tensor: BytesTensor) -> bool:
    try:
        return len(tensor.offsets) == tensor.size + 1
    except InvalidArgument:
        return False


def _reshape(tensor: Any, spec: Spec, batched: bool) -> Any:
    batch = tensor.shape[:1] if batched else ()
    return tensor.reshape(batch + spec.apply_reshape(tensor.shape[len(batch) :]))
