"""The outputs that a model declares, and the check that its backend returns these."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from headrace.errors import BackendError, HeadraceError
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.spec import Spec
from headrace.messages.tensor import Tensor, as_tensor, data_type

log = logging.getLogger(__name__)

_UNUSUAL: tuple[Any, tuple[int, ...]] = (None, ())


@dataclass(frozen=True, slots=True)
class OutputSchema:
    """The name, version and outputs of a model. If ``batched``, outputs have a batch axis.

    An output whose data type or dims differ from the config is an error. If outputs are taken ``as_given``, it is
    passed on unchanged instead, with one warning per output.
    """

    name: str
    version: str
    outputs: Mapping[str, Spec]
    batched: bool
    as_given: bool = False
    #: Per output: its rank as the backend returns it (with the batch axis), and the axes with a fixed size.
    _shapes: Mapping[str, tuple[int, tuple[tuple[int, int], ...]]] = field(init=False, repr=False, compare=False)
    _warned: set[str] = field(init=False, repr=False, compare=False, default_factory=set)
    #: Per output, the dtype and the dims without the batch axis of the last valid array; the next one nearly always has
    #: the same. Not used for outputs with a reshape.
    _usual: dict[str, tuple[Any, tuple[int, ...]]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        begin = int(self.batched)
        object.__setattr__(
            self,
            "_shapes",
            {
                name: (
                    begin + len(spec.backend_dims),
                    tuple((axis, size) for axis, size in enumerate(spec.backend_dims, begin) if size >= 0),
                )
                for name, spec in self.outputs.items()
            },
        )

    @classmethod
    def from_json(cls, config: Mapping[str, Any], version: str, as_given: bool = False) -> OutputSchema:
        """Return the schema of a config in the form of the ``/config`` endpoint. Shapes are the backend's, before the
        reshape."""
        outputs = {output["name"]: Spec.from_json(output) for output in config.get("output", ())}
        return cls(config["name"], version, outputs, config.get("max_batch_size", 0) > 0, as_given)

    def accept_result(self, spec: Spec, value: Any, rows: int) -> Tensor:
        """Return the output ``value`` of a backend as `as_tensor` and `accept` do. Raises `BackendError`."""
        if type(value) is np.ndarray:
            dtype, dims = self._usual.get(spec.name, _UNUSUAL)
            if value.dtype is dtype:
                shape = value.shape
                if (shape[1:] == dims and shape[0] == rows) if self.batched and shape else shape == dims:
                    return value
        tensor = self.accept(spec, as_tensor(value), rows)
        if type(tensor) is np.ndarray and spec.reshape is None:
            self._usual[spec.name] = tensor.dtype, tensor.shape[int(self.batched) :]
        return tensor

    def accept(self, spec: Spec, tensor: Tensor, rows: int) -> Tensor:
        """Return ``tensor`` in the shape that clients get. Raises `BackendError` if it does not fit."""
        if data_type(tensor) is not spec.datatype:
            self._differs_in_type(spec, tensor)
        shape = tensor.shape
        if self.batched and (not shape or shape[0] != rows):
            raise BackendError(
                f"model '{self.name}': output '{spec.name}' has shape {list(shape)}, but the batch has {rows} rows"
            )
        rank, fixed = self._shapes[spec.name]
        fits = len(shape) == rank
        if fits:
            for axis, size in fixed:
                if shape[axis] != size:
                    fits = False
        if not fits:
            expected = [-1] * self.batched + list(spec.backend_dims)
            self._differs(spec, f"has shape {list(shape)}, but the config says {expected}")
        return tensor if spec.reshape is None else self._undo_reshape(spec, tensor)

    def sign(self, request: InferRequest, response: InferResponse) -> InferResponse:
        """Return ``response`` with the name of this model and the requested outputs. Raises `BackendError`.

        If an instance answers request by request, its dims are not checked, only reshaped. Outputs
        that were not requested are dropped unchecked, unless all of them are unknown (docs/spec/behaviours.md section
        9.3).
        """
        outputs: dict[str, Tensor] = {}
        # If outputs are taken as given, there may be more than in the config. A request that names none gets those of
        # the config only.
        requested = request.outputs or (self.outputs if self.as_given else ())
        for name, value in response.outputs.items():
            if not requested or name in requested:
                tensor, spec = as_tensor(value), self._spec(name)
                if data_type(tensor) is not spec.datatype:
                    self._differs_in_type(spec, tensor)
                outputs[name] = tensor if spec.reshape is None else self._undo_reshape(spec, tensor)
        if not outputs and response.outputs and self.outputs.keys().isdisjoint(response.outputs):
            self._spec(next(iter(response.outputs)))
        return InferResponse(outputs, response.parameters, self.name, self.version, request.id)

    def signed(self, request: InferRequest, answer: Answer) -> Answer:
        """Do as `sign` for any answer. If the response is wrong, return the error instead."""
        if not isinstance(answer, InferResponse):
            return answer
        try:
            return self.sign(request, answer)
        except HeadraceError as error:
            return error

    def _spec(self, name: str) -> Spec:
        spec = self.outputs.get(name)
        if spec is None:
            known = list(self.outputs)
            raise BackendError(
                f"model '{self.name}': the backend returned output '{name}', but the config has only {known}"
            )
        return spec

    def _undo_reshape(self, spec: Spec, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in the shape that clients get (docs/spec/behaviours.md section 4.4)."""
        batch = tensor.shape[:1] if self.batched else ()
        shape = batch + spec.undo_reshape(tensor.shape[len(batch) :])
        if prod(shape) != prod(tensor.shape):
            raise BackendError(
                f"model '{self.name}': output '{spec.name}' has shape {list(tensor.shape)}, which does not fit the "
                f"reshape of the config, {list(spec.backend_dims)}"
            )
        return tensor.reshape(shape)

    def _differs_in_type(self, spec: Spec, tensor: Tensor) -> None:
        self._differs(spec, f"is {data_type(tensor)}, but the config says {spec.datatype}")

    def _differs(self, spec: Spec, how: str) -> None:
        """Raise `BackendError` for an output that differs from the config. If outputs are taken as given, warn once
        instead."""
        text = f"model '{self.name}': output '{spec.name}' {how}"
        if not self.as_given:
            raise BackendError(text)
        if spec.name not in self._warned:
            self._warned.add(spec.name)
            log.warning("%s; it is passed on as it is", text)
