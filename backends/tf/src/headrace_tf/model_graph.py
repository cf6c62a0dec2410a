"""The content of a model file of any kind: the graph, its inputs and outputs, and its actions at load.

A SavedModel has its inputs and outputs in signatures. For a frozen graph, the config must name the nodes
(docs/spec/behaviours.md section 10.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import ConfigError, DataType, LoadError, ModelConfig, ModelInput, ModelOutput, dtypes, one_line
from headrace_engines import Graph, GraphTensor

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
#: Operators that run functions again and again, and the one that loops of TensorFlow 1 end by.
_LOOPS = frozenset(("While", "StatelessWhile", "For", "LoopCond"))
#: The amount by which the type number of a TensorFlow 1 variable is larger than that of its value.
_REFERENCE = 100


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The variables of a SavedModel: ``restore_op`` reads them from the files with the prefix ``prefix``.

    The tensor ``filename_tensor`` gets that prefix.
    """

    restore_op: str
    filename_tensor: str
    prefix: Path


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """The graph of one version. Tensors have TensorFlow's names, ``node:0``.

    - ``inputs`` and ``outputs`` map the names of the config to tensors. ``graph`` describes them; a shape of None there
      is the config's.
    - ``unranked``: tensors whose number of axes the file does not have.
    - ``defaults``: values for inputs that a request lacks.
    - ``assets`` maps tensors to the files of the model that they name while it loads.
    - ``init_ops``: operators that run once, after the variables are restored.
    """

    path: Path
    graph_def: Any
    graph: Graph
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    unranked: Set[str] = frozenset()
    defaults: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    assets: Mapping[str, Path] = field(default_factory=dict)
    init_ops: tuple[str, ...] = ()

    @property
    def repeats(self) -> bool:
        """True if it has loops."""
        parts = (self.graph_def.node, *(each.node_def for each in self.graph_def.library.function))
        return any(node.op in _LOOPS for node in chain.from_iterable(parts))


def node_of(tensor: str) -> str:
    """Return the node that ``tensor``, or a control input (``^node``), names."""
    return tensor.lstrip("^").partition(":")[0]


def needed_nodes(graph_def: Any, roots: Iterable[str], fed: Set[str] = frozenset()) -> list[Any]:
    """Return the nodes that run for ``roots``, nodes or tensors. ``fed`` ones do not run, and need nothing."""
    nodes = {node.name: node for node in graph_def.node}
    waiting, found = [node_of(root) for root in roots], dict[str, Any]()
    while waiting:
        name = waiting.pop()
        if name not in found and name not in fed and name in nodes:
            found[name] = nodes[name]
            waiting += map(node_of, nodes[name].input)
    return list(found.values())


def require_fed(model: str, graph: ModelGraph, outputs: Iterable[str]) -> None:
    """Raise `LoadError` for a placeholder that ``outputs`` need and no input feeds: every request would fail."""
    roots = [graph.outputs[name] for name in outputs]
    for node in needed_nodes(graph.graph_def, roots, {node_of(tensor) for tensor in graph.inputs.values()}):
        if node.op == "Placeholder":
            raise LoadError(
                f"unable to load model '{model}': the outputs of '{graph.path}' need the placeholder "
                f"'{one_line(node.name)}', which is none of the inputs {', '.join(sorted(graph.inputs))}"
            )


def tensor_of(tensorflow: Any, name: str, enum: int, shape: Any, is_tensor: bool, config: ModelConfig) -> GraphTensor:
    """Return one input or output; ``shape`` is a ``TensorShapeProto``.

    The protocol has no shape without a rank. As in Triton, a shape that the file does not have is the config's, or
    empty if the config has none.
    """
    dims = tuple(dim.size for dim in shape.dim)
    if shape.unknown_rank:
        configured = Graph.of_config(config)
        found = configured.inputs.get(name) or configured.outputs.get(name)
        dims = found.shape if found else ()
    enum %= _REFERENCE
    return GraphTensor(name, ELEMENT_TYPES.get(enum), tensorflow.dtypes.as_dtype(enum).name, dims, is_tensor)


def default_of(tensorflow: Any, graph_def: Any, tensor: str) -> npt.NDArray[Any] | None:
    """Return the default of ``tensor``: the constant of a ``PlaceholderWithDefault``; None for everything else."""
    nodes = {node.name: node for node in graph_def.node}
    node = nodes.get(node_of(tensor))
    if node is None or node.op != "PlaceholderWithDefault":
        return None
    source = nodes.get(node_of(node.input[0]))
    if source is None or source.op != "Const":
        return None
    return np.asarray(tensorflow.make_ndarray(source.attr["value"].tensor))


def graph_of(
    config: ModelConfig,
    inputs: Mapping[str, GraphTensor],
    outputs: Mapping[str, GraphTensor],
    defaults: Set[str],
) -> Graph:
    """Return the graph for the check of the config: an input with a default is optional unless the config requires
    it."""
    required = {io.name for io in config.input if not io.optional}
    optional = {name: info for name, info in inputs.items() if name in defaults - required}
    return Graph({name: info for name, info in inputs.items() if name not in optional}, outputs, optional)


def require_ranks(config: ModelConfig, graph: ModelGraph) -> None:
    """Raise `ConfigError` for a tensor without a rank in file and config: nothing can be completed."""
    tensors: Iterable[ModelInput | ModelOutput] = chain(config.input, config.output)
    for name in sorted(graph.unranked - {io.name for io in tensors}):
        raise ConfigError(
            f"unable to autofill for '{config.name}': the rank of model tensor '{name}' is 0 which is not supported"
        )
