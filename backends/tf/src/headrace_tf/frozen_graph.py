"""Frozen graphs: one file with a ``GraphDef`` whose variables have become constants.

The file does not mark the nodes for callers, so the config must name them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from headrace import ConfigError, LoadError, Model, ModelConfig, one_line, read_regular
from headrace_engines import Graph, GraphTensor
from headrace_tf.model_graph import ModelGraph, default_of, graph_of, node_of, tensor_of

_PLACEHOLDERS = ("Placeholder", "PlaceholderWithDefault")
#: A placeholder without dims is a scalar in graphs of this version and later, and of any shape in those before
#: (TensorFlow's array_ops.cc, Placeholder).
_SCALARS_SINCE = 24
_LISTED = 10


def read_frozen_graph(tensorflow: Any, model: Model, path: Path) -> ModelGraph:
    """Return the graph, with the inputs and outputs that the config names; `with_outputs` describes the latter.

    Raises `LoadError` naming the file, and `ConfigError` for a name that is not in it.
    """
    graph_def = _parse(tensorflow, model, path)
    config = model.config
    if not config.input or not config.output:
        raise ConfigError(
            f"unable to load model '{model.name}': a frozen graph does not tell its inputs and outputs, so the model "
            "configuration must name both"
        )
    placeholders = {node.name: node for node in graph_def.node if node.op in _PLACEHOLDERS}
    others = {node.name for node in graph_def.node} - placeholders.keys()
    if len(config.input) > len(placeholders):
        raise ConfigError(
            f"unable to load model '{model.name}', configuration expects {len(config.input)} inputs, model provides "
            f"at most {len(placeholders)}"
        )
    configured = Graph.of_config(config)
    tensors = {name: _tensor_named(name, placeholders, "input") for name in configured.inputs}
    outputs = {name: _tensor_named(name, others, "output") for name in configured.outputs}
    inputs = {name: _placeholder(tensorflow, name, graph_def, placeholders[node_of(name)], config) for name in tensors}
    found = {name: default_of(tensorflow, graph_def, tensor) for name, tensor in tensors.items()}
    defaults = {name: value for name, value in found.items() if value is not None}
    graph = graph_of(config, inputs, {}, defaults.keys())
    return ModelGraph(path, graph_def, graph, tensors, outputs, defaults=defaults)


def with_outputs(tensorflow: Any, config: ModelConfig, graph: ModelGraph, imported: Any) -> ModelGraph:
    """Return ``graph`` with the types and shapes of its outputs, which TensorFlow has inferred for ``imported``.

    Raises `ConfigError` for an output that its node does not have.
    """
    found = {}
    for name, tensor in graph.outputs.items():
        try:
            result = imported.get_tensor_by_name(tensor)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"unexpected inference output '{name}': {one_line(str(error.args[0]))}") from error
        enum, shape = result.dtype.as_datatype_enum, result.shape.as_proto()
        found[name] = tensor_of(tensorflow, name, enum, shape, True, config)
    return replace(graph, graph=Graph(graph.graph.inputs, found, graph.graph.optional))


def _parse(tensorflow: Any, model: Model, path: Path) -> Any:
    lead = f"unable to load model '{model.name}': '{path}'"
    try:
        graph_def = tensorflow.compat.v1.GraphDef.FromString(read_regular(path))
    except OSError as error:
        raise LoadError(f"{lead}: {error.strerror}; a frozen graph is a file") from error
    except DecodeError as error:
        raise LoadError(f"{lead} is no frozen graph: {one_line(str(error))}") from error
    if not graph_def.node:
        raise LoadError(
            f"{lead}: model {model.name} has an empty network. What lies in saved_model.pb is served as "
            "model.savedmodel, the directory"
        )
    return graph_def


def _tensor_named(name: str, known: Iterable[str], direction: str) -> str:
    """Return ``node:0`` for the name of a node, and the name of a tensor unchanged. Raises `ConfigError` with the
    allowed names."""
    known = sorted(known)
    if node_of(name) in known:
        return name if ":" in name else f"{name}:0"
    nearest = known if len(known) <= _LISTED else get_close_matches(name, known, _LISTED, 0.3)
    more = len(known) - len(nearest)
    raise ConfigError(
        f"unexpected inference {direction} '{name}', allowed {direction}s are: {one_line(', '.join(nearest))}"
        + (f" and {more} more" if more else "")
    )


def _placeholder(tensorflow: Any, name: str, graph_def: Any, node: Any, config: ModelConfig) -> GraphTensor:
    shape = node.attr["shape"].shape
    is_of_old = graph_def.versions.producer < _SCALARS_SINCE and not shape.dim
    if "shape" not in node.attr or is_of_old:
        shape = type(shape)(unknown_rank=True)
    return tensor_of(tensorflow, name, node.attr["dtype"].type, shape, True, config)
