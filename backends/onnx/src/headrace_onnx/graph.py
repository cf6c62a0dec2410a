"""What an ONNX graph says about its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace import Code, DataType, LoadError, dtypes

#: ONNX Runtime's spelling of an element type, and ours. Anything else is not in the protocol.
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


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output of a graph. ``type`` is ONNX Runtime's name for it, such as
    ``tensor(float)``. ``shape`` includes a batch axis if there is one; -1 is any size. It is
    empty for a scalar, and also when the graph does not know the rank."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def datatype(self) -> DataType | None:
        """None when the protocol has no such type."""
        return ELEMENT_TYPES.get(self.type.removeprefix("tensor(").removesuffix(")"))

    @property
    def batches(self) -> bool:
        """Whether the first axis can be the batch."""
        return self.shape[:1] == (-1,)

    def require_datatype(self, direction: str, model: str) -> DataType:
        """The data type, or `LoadError` saying that it cannot be served. ``direction`` is
        ``input`` or ``output``."""
        if not self.type.startswith("tensor("):
            raise LoadError(
                f"unable to load model '{model}': {direction} '{self.name}' is {self.type}, not a tensor. To serve "
                "the other outputs, name them in the model configuration",
                Code.UNSUPPORTED,
            )
        if (datatype := self.datatype) is None:
            raise LoadError(f"unsupported datatype {self.type} for {direction} '{self.name}' for model '{model}'")
        return datatype


@dataclass(frozen=True, slots=True)
class Graph:
    """The signature of an ONNX graph. ``optional`` are inputs that have a default value."""

    inputs: dict[str, TensorInfo]
    outputs: dict[str, TensorInfo]
    optional: dict[str, TensorInfo]

    @classmethod
    def of(cls, session: Any) -> Graph:
        """The graph of an ``onnxruntime.InferenceSession``."""
        return cls(
            _infos(session.get_inputs()),
            _infos(session.get_outputs()),
            _infos(session.get_overridable_initializers()),
        )


def _infos(nodes: Iterable[Any]) -> dict[str, TensorInfo]:
    return {node.name: TensorInfo(node.name, node.type, _shape(node.shape)) for node in nodes}


def _shape(dims: Sequence[int | str | None]) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in dims)
