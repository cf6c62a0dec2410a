"""Read the inputs and outputs of a model from OpenVINO."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace import DataType, LoadError, ModelConfig, dtypes
from headrace_engines import Graph, GraphTensor

#: OpenVINO's name of an element type, and ours. Others, strings among them, are refused.
ELEMENT_TYPES: Mapping[str, DataType] = {
    "f32": dtypes.FP32,
    "f64": dtypes.FP64,
    "f16": dtypes.FP16,
    "bf16": dtypes.BF16,
    "i8": dtypes.INT8,
    "i16": dtypes.INT16,
    "i32": dtypes.INT32,
    "i64": dtypes.INT64,
    "u8": dtypes.UINT8,
    "u16": dtypes.UINT16,
    "u32": dtypes.UINT32,
    "u64": dtypes.UINT64,
    "boolean": dtypes.BOOL,
}
#: The types that OpenVINO's CPU computes as INT32, UINT32 or FP32.
_NARROWED = (dtypes.INT64, dtypes.UINT64, dtypes.FP64)

#: The suffix of an output's name in the name of its operator.
_SINK = "/sink_port_"


def graph_of(opened: Any, config: ModelConfig) -> Graph:
    """Return the graph of an ``openvino.Model``, in the file's order.

    The batch axis of a graph made for batches of exactly ``max_batch_size`` counts as one: -1.
    Raises `LoadError` for a tensor without a name or a rank.
    """
    named = port_names(opened, config)
    inputs, outputs = (
        [_describe(port, name, direction, config) for port, name in zip(ports, names, strict=True)]
        for ports, names, direction in zip((opened.inputs, opened.outputs), named, ("input", "output"), strict=True)
    )
    if fixed_batch(opened, config):
        inputs, outputs = ([_unfix(each) for each in infos] for infos in (inputs, outputs))
    return Graph({info.name: info for info in inputs}, {info.name: info for info in outputs})


def with_resolved_dims(graph: Graph, compiled: Any, config: ModelConfig) -> Graph:
    """Return ``graph`` with dims of outputs that only the compiled model has, if the config has the same.

    A config that was completed from the file has -1 there.
    """
    configured = Graph.of_config(config).outputs
    outputs = dict(graph.outputs)
    for info, port in zip(graph.outputs.values(), compiled.outputs, strict=False):
        resolved = _shape(port)
        if info.name in configured and resolved == configured[info.name].shape:
            outputs[info.name] = replace(info, shape=resolved)
    return replace(graph, outputs=outputs)


def port_names(opened: Any, config: ModelConfig) -> tuple[list[str], list[str]]:
    """Return the names of all inputs and of all outputs, one for each.

    OpenVINO may have several names for a tensor, including the names of equal tensors. The name in the config takes
    precedence. Otherwise an output has its name in the file, and an input a name that no output has.
    """
    configured = Graph.of_config(config)
    outputs = _choose([_aliases(port, config) for port in opened.outputs], configured.outputs)
    return _choose([_aliases(port, config) for port in opened.inputs], configured.inputs, outputs), outputs


def fixed_batch(opened: Any, config: ModelConfig) -> int:
    """Return the fixed number of rows of a batch: ``max_batch_size`` if all tensors have it as a fixed first axis.

    Return 0 if any number is valid, or if the model does not batch.
    """
    rows: int = config.max_batch_size
    shapes = [_shape(port) for port in (*opened.inputs, *opened.outputs)]
    return rows if rows > 0 and all(shape is not None and shape[:1] == (rows,) for shape in shapes) else 0


def narrowed(opened: Any, config: ModelConfig) -> list[str]:
    """Return the tensors, with their types, that OpenVINO's CPU computes with half of their bits."""
    graph = graph_of(opened, config)
    described = (*graph.inputs.values(), *graph.outputs.values())
    return [f"{info.name} ({info.datatype.name})" for info in described if info.datatype in _NARROWED]


def _describe(port: Any, name: str, direction: str, config: ModelConfig) -> GraphTensor:
    model, kind, shape = config.name, port.get_element_type().get_type_name(), _shape(port)
    if not name:
        raise LoadError(f"unable to load model '{model}': an {direction} has no name")
    if shape is None:
        raise LoadError(f"unable to load model '{model}': {direction} '{name}' has no fixed number of dimensions")
    return GraphTensor(name, ELEMENT_TYPES.get(kind), kind, shape)


def _unfix(info: GraphTensor) -> GraphTensor:
    return GraphTensor(info.name, info.datatype, info.type, (-1, *info.shape[1:]))


def _choose(aliases: Iterable[Sequence[str]], configured: Container[str], avoided: Container[str] = ()) -> list[str]:
    """Return one name of each of ``aliases``, if possible unique: a configured one, else one that is not avoided."""
    chosen: list[str] = []
    for names in aliases:
        free = [name for name in names if name not in chosen] or names
        candidates = (
            [name for name in free if name in configured] or [name for name in free if name not in avoided] or free
        )
        chosen.append(candidates[0])
    return chosen


def _aliases(port: Any, config: ModelConfig) -> list[str]:
    """Return the names of a tensor, always in the same order; if it has none, the name of its operator."""
    try:
        operator = str(port.get_node().get_friendly_name())
        names = port.get_names()
    except UnicodeDecodeError as error:
        raise LoadError(f"unable to load model '{config.name}': the name of a tensor is not UTF-8: {error}") from error
    own = operator.partition(_SINK)[0]  # the reader of ONNX names the operator of an output after it
    return sorted(names, key=lambda name: (name != own, name)) or [operator]


def _shape(port: Any) -> tuple[int, ...] | None:
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return None
    return tuple(-1 if dim.is_dynamic else dim.get_length() for dim in shape)
