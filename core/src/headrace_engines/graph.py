"""Inputs and outputs of a model, from its file or its config.

A backend creates a `Graph` from a file; `complete_from_graph` and `check_against_graph` compare it with the config.
`Graph.of_config` has the tensors of a config, including tensors that no client sends or receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from headrace import Code, DataType, LoadError, ModelConfig, ModelInput, ModelOutput, dtypes, padding_inputs

_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """One input or output of a model file.

    - ``datatype``: None if the protocol has no such type; ``type`` is the engine's name of it, for messages.
    - ``shape``: with the batch axis, if there is one; -1 is any size. Empty for a scalar, or for an unknown rank.
    - ``is_tensor``: False for a list, a map and the like.
    - ``is_shape_tensor``: its values are shapes. It has no batch axis. If the model batches, its first value is the
      batch size, which is not in the config.
    """

    name: str
    datatype: DataType | None
    type: str
    shape: tuple[int, ...]
    is_tensor: bool = True
    is_shape_tensor: bool = False

    @property
    def batches(self) -> bool:
        """True if the first axis can be the batch."""
        return self.shape[:1] == (-1,)

    def require_datatype(self, direction: str, model: str) -> DataType:
        """Return the data type. Raises `LoadError` if it cannot be served. ``direction`` is ``input`` or ``output``."""
        if not self.is_tensor:
            raise LoadError(
                f"unable to load model '{model}': {direction} '{self.name}' is {self.type}, not a tensor, and "
                "the protocol carries tensors only",
                Code.UNSUPPORTED,
            )
        if self.datatype is None:
            raise LoadError(f"unsupported datatype {self.type} for {direction} '{self.name}' for model '{model}'")
        return self.datatype


@dataclass(frozen=True, slots=True)
class Graph:
    """Inputs and outputs of a model file by name, in the file's order. ``optional`` are inputs with a default."""

    inputs: Mapping[str, GraphTensor]
    outputs: Mapping[str, GraphTensor]
    optional: Mapping[str, GraphTensor] = field(default_factory=dict)

    @classmethod
    def of_config(cls, config: ModelConfig) -> Graph:
        """Return the inputs and outputs of an execution by the config, in this order.

        - Inputs: ``input``, the controls and states of ``sequence_batching``, ``batch_input``, and the inputs of the
          parameter ``padding``.
        - Outputs: ``output``, and states.

        None of them is ``optional``. Shapes are the model's: with the batch axis, after ``reshape``, and [-1] for
        ragged inputs. Unknown values, such as the data type of a control, are None as a ``datatype`` and "unknown" as a
        ``type``. ``padding`` is ignored until the config has inputs and outputs. Raises `ConfigError` if that parameter
        is invalid.
        """
        batch = (-1,) if config.max_batch_size > 0 else ()
        sequence = config.sequence_batching
        inputs = [_described(io, batch) for io in config.input]
        inputs += [GraphTensor(control.name, None, _UNKNOWN, (*batch, 1)) for control in sequence.control_input]
        inputs += [_tensor(state.input_name, state.data_type, (*batch, *state.dims)) for state in sequence.state]
        inputs += [_tensor(name, made.data_type, (-1,)) for made in config.batch_input for name in made.target_name]
        outputs = [_described(io, batch) for io in config.output]
        outputs += [_tensor(state.output_name, state.data_type, (*batch, *state.dims)) for state in sequence.state]
        made = padding_inputs(config) if config.input and config.output else ()
        inputs += [GraphTensor(spec.name, spec.datatype, spec.datatype.config_name, spec.dims) for spec in made]
        return cls(_by_name(inputs), _by_name(outputs))


def _described(io: ModelInput | ModelOutput, batch: tuple[int, ...]) -> GraphTensor:
    dims = tuple(io.reshape.shape) if io.HasField("reshape") else tuple(io.dims)
    if io.is_shape_tensor:
        whole = _tensor(io.name, io.data_type, tuple(dim + len(batch) for dim in dims))
        return replace(whole, is_shape_tensor=True)
    is_ragged = isinstance(io, ModelInput) and io.allow_ragged_batch
    return _tensor(io.name, io.data_type, (-1,) if is_ragged else (*batch, *dims))


def _tensor(name: str, data_type: int, shape: tuple[int, ...]) -> GraphTensor:
    datatype = dtypes.BY_CONFIG_VALUE.get(data_type)
    return GraphTensor(name, datatype, datatype.config_name if datatype else _UNKNOWN, shape)


def _by_name(tensors: Iterable[GraphTensor]) -> dict[str, GraphTensor]:
    """Return the first tensor of each name: a state may also be an output of clients."""
    found: dict[str, GraphTensor] = {}
    for tensor in tensors:
        found.setdefault(tensor.name, tensor)
    return found
