"""Inputs and outputs of a model as OpenVINO tells them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace import DataType, Graph, GraphTensor, LoadError, ModelConfig, dtypes

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
#: What OpenVINO's CPU computes as INT32, UINT32 or FP32.
_NARROWED = (dtypes.INT64, dtypes.UINT64, dtypes.FP64)


def graph_of(opened: Any, config: ModelConfig) -> Graph:
    """The graph of an ``openvino.Model`` or ``CompiledModel``, in the file's order.

    The batch axis of a graph made for batches of exactly ``max_batch_size`` counts as one: -1.
    Raises `LoadError` for a tensor without a name or a rank.
    """
    inputs = [_describe(port, "input", config) for port in opened.inputs]
    outputs = [_describe(port, "output", config) for port in opened.outputs]
    if fixed_batch(opened, config):
        inputs, outputs = ([_unfix(each) for each in infos] for infos in (inputs, outputs))
    return Graph({info.name: info for info in inputs}, {info.name: info for info in outputs})


def fixed_batch(opened: Any, config: ModelConfig) -> int:
    """The number of rows that every batch must have: ``max_batch_size`` if all tensors have it as a fixed first axis.
    0 if any number will do, or the model does not batch."""
    rows: int = config.max_batch_size
    shapes = [_shape(port) for port in (*opened.inputs, *opened.outputs)]
    return rows if rows > 0 and all(shape is not None and shape[:1] == (rows,) for shape in shapes) else 0


def narrowed(opened: Any, config: ModelConfig) -> list[str]:
    """The tensors, with their types, that OpenVINO's CPU computes with half of their bits."""
    described = [_describe(port, "tensor", config) for port in (*opened.inputs, *opened.outputs)]
    return [f"{info.name} ({info.datatype.name})" for info in described if info.datatype in _NARROWED]


def names_of(ports: Iterable[Any], config: ModelConfig) -> list[str]:
    return [_name(port, config) for port in ports]


def _describe(port: Any, direction: str, config: ModelConfig) -> GraphTensor:
    model = config.name
    name, kind, shape = _name(port, config), port.get_element_type().get_type_name(), _shape(port)
    if not name:
        raise LoadError(f"unable to load model '{model}': an {direction} has no name")
    if shape is None:
        raise LoadError(f"unable to load model '{model}': {direction} '{name}' has no fixed number of dimensions")
    return GraphTensor(name, ELEMENT_TYPES.get(kind), kind, shape)


def _unfix(info: GraphTensor) -> GraphTensor:
    return GraphTensor(info.name, info.datatype, info.type, (-1, *info.shape[1:]))


def _name(port: Any, config: ModelConfig) -> str:
    """The one of its names that the config uses, else always the same; that of its operator if it has none."""
    try:
        names: list[str] = sorted(port.get_names()) or [str(port.get_node().get_friendly_name())]
    except UnicodeDecodeError as error:
        raise LoadError(f"unable to load model '{config.name}': the name of a tensor is not UTF-8: {error}") from error
    told = Graph.of_config(config)
    wanted = told.inputs.keys() | told.outputs.keys()
    return next((name for name in names if name in wanted), names[0])


def _shape(port: Any) -> tuple[int, ...] | None:
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return None
    return tuple(-1 if dim.is_dynamic else dim.get_length() for dim in shape)
