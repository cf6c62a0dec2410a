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
    """``dims`` exclude the batch axis; -1 is any size. ``reshape`` is what the backend sees
    instead of ``dims``, or None for the same (docs/spec/behaviours.md sections 3.2 step 8 and 4.4).
    A shape tensor has no batch axis."""

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
        """`from_config` of what the ``/config`` endpoint gives, since a child has no protobuf. Its ``dims`` are
        those that the backend sees: nothing is reshaped in a child."""
        dims = io["reshape"]["shape"] if io.get("reshape") else io["dims"]
        return cls(io["name"], dtypes.BY_CONFIG_NAME[io["data_type"]], tuple(dims))

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {"name": self.name, "data_type": self.datatype.config_name, "dims": list(self.backend_dims)}

    @property
    def backend_dims(self) -> Shape:
        """``dims`` as the backend sees them."""
        return self.dims if self.reshape is None else self.reshape

    def apply_reshape(self, shape: Shape) -> Shape:
        """What the backend sees for a request's ``shape`` (without batch axis)."""
        return shape if self.reshape is None else _substitute(self.dims, shape, self.reshape)

    def undo_reshape(self, shape: Shape) -> Shape:
        """What the client sees for a backend's ``shape`` (without batch axis)."""
        return shape if self.reshape is None else _substitute(self.reshape, shape, self.dims)


def _substitute(pattern: Shape, shape: Shape, target: Shape) -> Shape:
    """``target`` with its variable dims taken, in order, from where ``pattern`` has them."""
    values = [got for want, got in zip(pattern, shape, strict=False) if want == -1]
    return tuple(values.pop(0) if dim == -1 and values else dim for dim in target)
