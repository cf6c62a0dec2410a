"""What is read from a model's file before anything runs: the graph, its inputs and outputs, and what loading does.

A SavedModel tells its inputs and outputs by signatures; of a frozen graph the config must say which of its nodes they
are (docs/spec/behaviours.md section 10.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from headrace import DataType, Graph, GraphTensor, ModelConfig, ModelInput, ModelOutput, dtypes

#: TensorFlow's number of an element type (``DataType`` in its types.proto), and ours. Others are not in the protocol.
ELEMENT_TYPES: Mapping[int, DataType] = {
    1: dtypes.FP32,
    2: dtypes.FP64,
    3: dtypes.INT32,
    4: dtypes.UINT8,
    5: dtypes.INT16,
    6: dtypes.INT8,
    7: dtypes.BYTES,
    9: dtypes.INT64,
    10: dtypes.BOOL,
    14: dtypes.BF16,
    17: dtypes.UINT16,
    19: dtypes.FP16,
    22: dtypes.UINT32,
    23: dtypes.UINT64,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where the variables of a SavedModel lie: ``restore_op`` reads them from the files that begin with ``prefix``,
    which the tensor ``filename_tensor`` is given."""

    restore_op: str
    filename_tensor: str
    prefix: Path


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """The graph of one version. Tensors are named as TensorFlow names them, ``node:0``.

    ``inputs`` and ``outputs`` map the names of the config to tensors, and ``graph`` describes them; a shape that is
    None there is that of the config. ``assets`` maps tensors to the files of the model that they name while it
    loads, and ``init_ops`` are the operators that then run, once, after the variables are restored.
    """

    path: Path
    graph_def: Any
    graph: Graph
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    checkpoint: Checkpoint | None = None
    assets: Mapping[str, Path] = field(default_factory=dict)
    init_ops: tuple[str, ...] = ()


def tensor_of(tensorflow: Any, name: str, enum: int, shape: Any, is_tensor: bool, config: ModelConfig) -> GraphTensor:
    """One input or output; ``shape`` is a ``TensorShapeProto``.

    The protocol has no shape without a rank: one that the file does not know is what the config says, as in Triton,
    and empty if the config says nothing.
    """
    dims = shape_in_config(config, name) if shape.unknown_rank else tuple(dim.size for dim in shape.dim)
    return GraphTensor(name, ELEMENT_TYPES.get(enum), tensorflow.dtypes.as_dtype(enum).name, dims, is_tensor)


def shape_in_config(config: ModelConfig, name: str) -> tuple[int, ...]:
    """The shape that the config gives ``name``, with the batch axis; empty if it does not name it."""
    batch = (-1,) if config.max_batch_size > 0 else ()
    given: Iterable[ModelInput | ModelOutput] = chain(config.input, config.output)
    for io in given:
        if io.name == name:
            if io.HasField("reshape"):
                return (*batch, *io.reshape.shape)
            ragged = getattr(io, "allow_ragged_batch", False)
            return (-1,) if ragged else (*batch, *io.dims)
    told = {control.name for control in config.sequence_batching.control_input}
    made = {target for each in config.batch_input for target in each.target_name}
    if name in told:
        return (*batch, 1)
    return (-1,) if name in made else ()
