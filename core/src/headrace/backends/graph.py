"""What an engine says of a model file: its inputs and outputs, whatever the engine.

A backend whose engine knows them makes a `Graph` of what it opened; `complete_from_graph` and
`check_against_graph` (``headrace.backends.agreement``) hold it against the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.errors import Code, LoadError
from headrace.messages.dtypes import DataType


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """One input or output of a model file.

    ``datatype`` is None when the protocol has no such type; ``type`` is what the engine calls it, for messages.
    ``shape`` includes a batch axis if there is one; -1 is any size. It is empty for a scalar, and also when
    the engine does not know the rank. ``is_tensor`` is False for a list, a map and the like. The values of an
    ``is_shape_tensor`` say shapes: it has no batch axis, and where the model batches its first value is the size of
    the batch, which its config leaves out.
    """

    name: str
    datatype: DataType | None
    type: str
    shape: tuple[int, ...]
    is_tensor: bool = True
    is_shape_tensor: bool = False

    @property
    def batches(self) -> bool:
        """Whether the first axis can be the batch."""
        return self.shape[:1] == (-1,)

    def require_datatype(self, direction: str, model: str) -> DataType:
        """The data type, or `LoadError` saying that it cannot be served. ``direction`` is
        ``input`` or ``output``."""
        if not self.is_tensor:
            raise LoadError(
                f"unable to load model '{model}': {direction} '{self.name}' is {self.type}, not a tensor. To serve "
                "the other outputs, name them in the model configuration",
                Code.UNSUPPORTED,
            )
        if self.datatype is None:
            raise LoadError(f"unsupported datatype {self.type} for {direction} '{self.name}' for model '{model}'")
        return self.datatype


@dataclass(frozen=True, slots=True)
class Graph:
    """Inputs and outputs of a model file by name, in the file's order. ``optional`` are inputs that have a default."""

    inputs: Mapping[str, GraphTensor]
    outputs: Mapping[str, GraphTensor]
    optional: Mapping[str, GraphTensor] = field(default_factory=dict)
