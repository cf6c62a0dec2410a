"""One input or output of a model, derived from its config at load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.messages import dtypes
from headrace.messages.dtypes import DataType

if TYPE_CHECKING:
    from headrace.config.model_config_pb2 import ModelInput, ModelOutput

Shape = tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Spec:
    """The name, data type and shape of one input or output.

    ``dims`` exclude the batch axis; -1 is any size. ``reshape`` is the shape that the backend gets instead of ``dims``,
    or None for the same (docs/spec/behaviours.md sections 3.2 step 8 and 4.4). A shape tensor has no batch axis.
    """

    name: str
    datatype: DataType
    dims: Shape
    optional: bool = False
    reshape: Shape | None = None
    is_shape_tensor: bool = False

    @classmethod
    def from_config(cls, io: ModelInput | ModelOutput) -> Spec:
        return cls(
            io.name,
            dtypes.BY_CONFIG_VALUE[io.data_type],
            tuple(io.dims),
            getattr(io, "optional", False),
            tuple(io.reshape.shape) if io.HasField("reshape") else None,
            io.is_shape_tensor,
        )

    @classmethod
    def from_json(cls, io: Mapping[str, Any]) -> Spec:
        """Return the spec of an input or output in the JSON of the ``/config`` endpoint. Child processes use it: they
        have no protobuf. Its ``dims`` are those of the backend: a child does not reshape."""
        dims = io["reshape"]["shape"] if io.get("reshape") else io["dims"]
        return cls(io["name"], dtypes.BY_CONFIG_NAME[io["data_type"]], tuple(dims))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `from_json` reads."""
        return {"name": self.name, "data_type": self.datatype.config_name, "dims": list(self.backend_dims)}

    @property
    def backend_dims(self) -> Shape:
        """The shape that the backend gets: ``reshape`` if there is one, else ``dims``."""
        return self.dims if self.reshape is None else self.reshape

    def apply_reshape(self, shape: Shape) -> Shape:
        """Return the shape that the backend gets for a request's ``shape``, both without the batch axis."""
        return shape if self.reshape is None else _substitute(self.dims, shape, self.reshape)

    def undo_reshape(self, shape: Shape) -> Shape:
        """Return the shape that the client gets for a backend's ``shape``, both without the batch axis."""
        return shape if self.reshape is None else _substitute(self.reshape, shape, self.dims)


def _substitute(pattern: Shape, shape: Shape, target: Shape) -> Shape:
    """Return ``target`` with its variable dims replaced, in order, by the sizes of the variable dims of ``pattern``."""
    values = [got for want, got in zip(pattern, shape, strict=False) if want == -1]
    return tuple(values.pop(0) if dim == -1 and values else dim for dim in target)
