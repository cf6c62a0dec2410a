"""Implicit state: outputs of the model that are inputs of the next request of the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headrace import (
    BytesTensor,
    ConfigError,
    DataType,
    InferRequest,
    InvalidArgument,
    ModelConfig,
    Spec,
    Tensor,
    dtypes,
    read_regular,
)
from headrace_sequence.live import LiveSequence


class States:
    """The states of ``config``. ``directory`` is the model's, with its ``initial_state``.

    ``initial`` has the states at the start of a sequence, by input name; empty if there are none. ``kept`` are the
    outputs. Raises `ConfigError` if an initial state cannot be read.
    """

    def __init__(self, config: ModelConfig, directory: Path | None) -> None:
        states = config.sequence_batching.state
        self._batch = (1,) if config.max_batch_size > 0 else ()
        self.kept = {
            state.output_name: Spec(state.output_name, dtypes.BY_CONFIG_VALUE[state.data_type], tuple(state.dims))
            for state in states
        }
        self.initial = {state.input_name: self._initial(state, directory) for state in states}
        self._names = [(state.output_name, state.input_name) for state in states]
        #: True if requests stack only if their states have the same shapes.
        self.is_variable = any(-1 in state.dims for state in states)

    def of_next(self, sequence: LiveSequence, request: InferRequest) -> Mapping[str, Tensor]:
        """Return the states for ``request`` of ``sequence``."""
        return self.initial if request.sequence_start else sequence.states

    def shapes(self, sequence: LiveSequence, request: InferRequest) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the states for ``request`` of ``sequence``."""
        return tuple([tensor.shape for tensor in self.of_next(sequence, request).values()])

    def update(self, sequence: LiveSequence, outputs: Mapping[str, Tensor]) -> None:
        """Keep the states that the model returned. Copies: they may be views on the outputs of a whole batch."""
        states = {**sequence.states}
        for name, input_name in self._names:
            tensor = outputs.get(name)
            if tensor is not None:
                states[input_name] = _copied(tensor)
        sequence.states = states

    def _initial(self, state: Any, directory: Path | None) -> Tensor:
        datatype = dtypes.BY_CONFIG_VALUE[state.data_type]
        for initial in state.initial_state:
            shape = (*self._batch, *initial.dims)
            if initial.data_file:
                return _read(datatype, shape, initial.data_file, directory)
            return _zero(datatype, shape)
        return _zero(datatype, (*self._batch, *(1 if dim == -1 else dim for dim in state.dims)))


def _zero(datatype: DataType, shape: tuple[int, ...]) -> Tensor:
    if datatype is dtypes.BYTES:
        return BytesTensor(bytes(4 * prod(shape)), shape)
    array = np.zeros(shape, datatype.numpy)
    array.flags.writeable = False
    return array


def _read(datatype: DataType, shape: tuple[int, ...], file: str, directory: Path | None) -> Tensor:
    """Return the initial state in ``file``: the elements row by row, strings in wire form."""
    if directory is None:
        raise ConfigError(f"initial_state '{file}' cannot be read: the model lies nowhere")
    path = directory / "initial_state" / file
    try:
        content = read_regular(path)
    except OSError as error:
        raise ConfigError(f"initial_state cannot be read from '{path}': {error.strerror}") from error
    if datatype is dtypes.BYTES:
        return _strings(content, shape, file)
    size = prod(shape) * datatype.itemsize
    if len(content) < size:
        raise _too_short(size, file, len(content))
    return np.frombuffer(content[:size], datatype.numpy).reshape(shape)


def _strings(content: bytes, shape: tuple[int, ...], file: str) -> Tensor:
    try:
        found = BytesTensor(content, (-1,)).offsets
    except InvalidArgument as error:
        raise ConfigError(f"initial_state in '{file}': {error}") from error
    count = prod(shape)
    if len(found) <= count:
        raise _too_short(4 * count, file, len(content))
    return BytesTensor(content[: int(found[count])], shape)


def _too_short(size: int, file: str, got: int) -> ConfigError:
    # Without a space, as Triton.
    return ConfigError(
        f"initial_state setting expects {size} bytes, but the data provided from {file}only has {got} bytes."
    )


def _copied(tensor: Tensor) -> Tensor:
    if isinstance(tensor, BytesTensor):
        return BytesTensor(bytes(tensor.buffer), tensor.shape)
    copied: Tensor = tensor.copy()
    return copied
