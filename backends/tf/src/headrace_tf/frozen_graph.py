"""Frozen graphs: one file with a ``GraphDef`` whose variables have become constants.

The file does not say which of its nodes are for callers, so that the config must.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from headrace import ConfigError, Graph, GraphTensor, LoadError, Model, one_line
from headrace_tf.model_graph import ModelGraph, tensor_of

_LISTED = 10


def read_frozen_graph(tensorflow: Any, model: Model, path: Path) -> ModelGraph:
    """The graph, with the inputs and outputs that the config names.

    Raises `LoadError` naming the file, and `ConfigError` for a name that is not in it.
    """
    graph_def = _parse(tensorflow, model, path)
    config = model.config
    if not config.input or not config.output:
        raise ConfigError(
            f"unable to load model '{model.name}': a frozen graph does not tell its inputs and outputs, so the model "
            "configuration must name both"
        )
    placeholders = {node.name: node for node in graph_def.node if node.op == "Placeholder"}
    others = {node.name for node in graph_def.node} - placeholders.keys()
    if len(config.input) > len(placeholders):
        raise ConfigError(
            f"unable to load model '{model.name}', configuration expects {len(config.input)} inputs, model provides "
            f"at most {len(placeholders)}"
        )
    inputs = {name: _tensor_named(name, placeholders, "input") for name in _input_names(config)}
    outputs = {name: _tensor_named(name, others, "output") for name in _output_names(config)}
    return ModelGraph(
        path,
        graph_def,
        Graph(
            {name: _placeholder(tensorflow, name, placeholders[_node(name)], config) for name in inputs},
            _results(tensorflow, model, path, graph_def, outputs),
        ),
        inputs,
        outputs,
    )


def _parse(tensorflow: Any, model: Model, path: Path) -> Any:
    lead = f"unable to load model '{model.name}': '{path}'"
    try:
        graph_def = tensorflow.compat.v1.GraphDef.FromString(path.read_bytes())
    except OSError as error:
        raise LoadError(f"{lead}: {error.strerror}; a frozen graph is a file") from error
    except DecodeError as error:
        raise LoadError(f"{lead} is no frozen graph: {one_line(str(error))}") from error
    if not graph_def.node:
        raise LoadError(f"{lead}: model {model.name} has an empty network")
    return graph_def


def _input_names(config: Any) -> Iterable[str]:
    batching = config.sequence_batching
    yield from (io.name for io in config.input)
    yield from (control.name for control in batching.control_input)
    yield from (state.input_name for state in batching.state)
    yield from (target for each in config.batch_input for target in each.target_name)


def _output_names(config: Any) -> Iterable[str]:
    yield from (io.name for io in config.output)
    yield from (state.output_name for state in config.sequence_batching.state)


def _node(name: str) -> str:
    return name.partition(":")[0]


def _tensor_named(name: str, known: Iterable[str], direction: str) -> str:
    """``node:0`` for a node's name, a tensor's name as it is. Raises `ConfigError` with those that are allowed."""
    known = sorted(known)
    if _node(name) in known:
        return name if ":" in name else f"{name}:0"
    nearest = known if len(known) <= _LISTED else get_close_matches(name, known, _LISTED, 0.3)
    more = len(known) - len(nearest)
    raise ConfigError(
        f"unexpected inference {direction} '{name}', allowed {direction}s are: {one_line(', '.join(nearest))}"
        + (f" and {more} more" if more else "")
    )


def _placeholder(tensorflow: Any, name: str, node: Any, config: Any) -> GraphTensor:
    shape = node.attr["shape"].shape
    if "shape" not in node.attr or (not shape.dim and not shape.unknown_rank and not _is_scalar(config, name)):
        shape = type(shape)(unknown_rank=True)  # graphs of old say so by no dims at all
    return tensor_of(tensorflow, name, node.attr["dtype"].type, shape, True, config)


def _is_scalar(config: Any, name: str) -> bool:
    return any(io.name == name and not io.reshape.shape and io.HasField("reshape") for io in config.input)


def _results(
    tensorflow: Any, model: Model, path: Path, graph_def: Any, outputs: dict[str, str]
) -> dict[str, GraphTensor]:
    """The outputs with the types and shapes that the engine infers."""
    with tensorflow.Graph().as_default() as graph:
        import_graph(tensorflow, model, path, graph_def)
        found = {}
        for name, tensor in outputs.items():
            try:
                result = graph.get_tensor_by_name(tensor)
            except (KeyError, ValueError) as error:
                raise ConfigError(f"unexpected inference output '{name}': {one_line(str(error.args[0]))}") from error
            found[name] = tensor_of(
                tensorflow, name, result.dtype.as_datatype_enum, result.shape.as_proto(), True, model.config
            )
        return found


def import_graph(tensorflow: Any, model: Model, path: Path, graph_def: Any) -> None:
    """Add ``graph_def`` to the graph of this thread. Raises `LoadError` naming ``path``."""
    from headrace_tf.tensorflow_module import reword

    try:
        tensorflow.import_graph_def(graph_def, name="")
    except Exception as error:  # ValueError, TypeError, KeyError and TensorFlow's own
        raise LoadError(f"unable to load model '{model.name}': '{path}': {reword(error)}") from error
