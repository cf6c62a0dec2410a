"""The inputs and outputs of an ONNX graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headrace import dtypes
from headrace_engines import Graph, GraphTensor

#: The protocol's data types by ONNX Runtime's names. The protocol lacks all other types.
ELEMENT_TYPES = {
    "bool": dtypes.BOOL,
    "uint8": dtypes.UINT8,
    "uint16": dtypes.UINT16,
    "uint32": dtypes.UINT32,
    "uint64": dtypes.UINT64,
    "int8": dtypes.INT8,
    "int16": dtypes.INT16,
    "int32": dtypes.INT32,
    "int64": dtypes.INT64,
    "float16": dtypes.FP16,
    "float": dtypes.FP32,
    "double": dtypes.FP64,
    "string": dtypes.BYTES,
    "bfloat16": dtypes.BF16,
}


def graph_of(session: Any) -> Graph:
    """Return the graph of an ``onnxruntime.InferenceSession``."""
    return Graph(
        _tensors(session.get_inputs()),
        _tensors(session.get_outputs()),
        _tensors(session.get_overridable_initializers()),
    )


def _tensors(nodes: Iterable[Any]) -> dict[str, GraphTensor]:
    return {node.name: _tensor(node) for node in nodes}


def _tensor(node: Any) -> GraphTensor:
    element = node.type.removeprefix("tensor(").removesuffix(")")
    is_tensor = node.type.startswith("tensor(")
    return GraphTensor(node.name, ELEMENT_TYPES.get(element), node.type, _shape(node.shape), is_tensor)


def _shape(dims: Sequence[int | str | None]) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in dims)
