"""The added inputs of a request: start, end, ready, the id of the sequence, and its state.

They are created once, at the load or the start of a sequence, and are read-only, because all requests share them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import BytesTensor, InferRequest, InvalidArgument, ModelConfig, Tensor, dtypes
from headrace_sequence.implicit_states import States
from headrace_sequence.live import LiveSequence

_START, _READY, _END, _ID = (f"CONTROL_SEQUENCE_{kind}" for kind in ("START", "READY", "END", "CORRID"))
_TYPES = {"int32_false_true": np.int32, "fp32_false_true": np.float32, "bool_false_true": np.bool_}
_UINT64 = 2**64 - 1


class AddedInputs:
    """Makes the control inputs of ``config``, and its ``states``."""

    def __init__(self, config: ModelConfig, states: States) -> None:
        self._model, self._states = config.name, states
        self._shape = (1, 1) if config.max_batch_size > 0 else (1,)
        self._id, self._id_type = "", dtypes.UINT64
        self._id_limit = 2**53
        pairs: dict[str, tuple[str, tuple[Tensor, Tensor]]] = {}
        for name, control in _controls(config):
            kind = control.Kind.Name(control.kind)
            if kind == _ID:
                self._id, self._id_type = name, dtypes.BY_CONFIG_VALUE[control.data_type]
                if self._id_type in (dtypes.INT32, dtypes.UINT32):
                    self._id_limit = 2**31
            else:
                pairs[kind] = name, self._pair(control)
        #: The control inputs by flags: 1 for start, 2 for end.
        self._flags = [
            self._inputs(pairs, {_START: bool(flags & 1), _READY: True, _END: bool(flags & 2)}) for flags in range(4)
        ]
        #: The inputs of an empty slot.
        self._null = self._inputs(pairs, dict.fromkeys(pairs, False))
        if self._id:
            self._null[self._id] = self._id_tensor("" if self._id_type is dtypes.BYTES else 0)

    def make_id(self) -> int | str:
        """Return a random id that fits the model's control for ids and JSON numbers."""
        if self._id and self._id_type is dtypes.BYTES:
            return secrets.token_hex(16)
        return secrets.randbelow(self._id_limit - 1) + 1

    def check(self, request: InferRequest) -> None:
        """Raise `InvalidArgument` if the model does not accept ids of the type that ``request`` has."""
        is_text = isinstance(request.sequence_id, str)
        if self._id and is_text is not (self._id_type is dtypes.BYTES):
            raise InvalidArgument(
                f"{request.log_id}sequence batching control '{self._id}' data-type is "
                f"'{'BYTES' if is_text else 'UINT64'}', but model '{self._model}' expects '{self._id_type.name}'"
            )

    def of(self, sequence: LiveSequence, request: InferRequest) -> Mapping[str, Tensor]:
        """Return the added inputs of ``request``, the next of ``sequence``. Its state is reset at a start."""
        flags = request.sequence_start + 2 * request.sequence_end
        inputs = sequence.inputs[flags]
        if inputs is None:
            inputs = self._flags[flags]
            if self._id:
                inputs = {**inputs, self._id: self._id_tensor(sequence.id)}
            sequence.inputs[flags] = inputs
        if not self._states.initial:
            return inputs
        if request.sequence_start:
            sequence.states = self._states.initial
        return {**inputs, **sequence.states} if inputs else sequence.states

    def keys(self, sequences: Sequence[LiveSequence]) -> list[object]:
        """Return the batch key of the next request of each of ``sequences``."""
        keys: list[object] = [sequence.tickets[0].batch_key for sequence in sequences]
        if self._states.is_variable:
            shapes = [self._states.shapes(sequence, sequence.tickets[0].request) for sequence in sequences]
            return list(zip(keys, shapes, strict=True))
        return keys

    def null(self, sequence: LiveSequence) -> dict[str, Tensor]:
        """Return all inputs of a padding request beside the next request of ``sequence``."""
        request = sequence.tickets[0].request
        states = self._states.of_next(sequence, request)
        inputs: Mapping[str, Any] = {**request.inputs, **states}
        return {**{name: _zeros(tensor) for name, tensor in inputs.items()}, **self._null}

    def _pair(self, control: Any) -> tuple[Tensor, Tensor]:
        """Return a control's tensors for false and for true."""
        (field,) = (name for name in _TYPES if getattr(control, name))
        no, yes = (_frozen(np.full(self._shape, value, _TYPES[field])) for value in getattr(control, field))
        return no, yes

    def _inputs(
        self, pairs: Mapping[str, tuple[str, tuple[Tensor, Tensor]]], flags: Mapping[str, bool]
    ) -> dict[str, Tensor]:
        return {name: pair[flags[kind]] for kind, (name, pair) in pairs.items()}

    def _id_tensor(self, id: int | str) -> Tensor:
        """Return the id in the data type of its control. A number is truncated to its bits."""
        if isinstance(id, str):
            return BytesTensor.from_items([id.encode(errors="replace")], self._shape)
        whole = np.array([id & _UINT64], np.uint64)
        return _frozen(whole.view(self._id_type.numpy)[:1].reshape(self._shape).copy())


def _controls(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    for tensor in config.sequence_batching.control_input:
        for control in tensor.control:
            yield tensor.name, control


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def _zeros(tensor: Tensor) -> Tensor:
    if isinstance(tensor, BytesTensor):
        return BytesTensor(bytes(4 * tensor.size), tensor.shape)
    return np.zeros(tensor.shape, tensor.dtype)
