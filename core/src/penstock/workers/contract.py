"""What a model promises to clients about its outputs, and the check that its backend keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import BackendError
from penstock.messages.spec import Spec
from penstock.messages.tensor import Tensor, data_type


@dataclass(frozen=True, slots=True)
class Contract:
    """The name, version and outputs of a model. ``batched``: outputs have a batch axis."""

    name: str
    version: str
    outputs: Mapping[str, Spec]
    batched: bool

    def accept(self, spec: Spec, tensor: Tensor, rows: int) -> Tensor:
        """``tensor`` in the shape that clients see, or `BackendError` saying what is wrong."""
        found = data_type(tensor)
        if found is not spec.datatype:
            raise BackendError(
                f"model '{self.name}': output '{spec.name}' is {found}, but the config says {spec.datatype}"
            )
        shape = tensor.shape
        if self.batched and (not shape or shape[0] != rows):
            raise BackendError(
                f"model '{self.name}': output '{spec.name}' has shape {list(shape)}, but the batch has {rows} rows"
            )
        if spec.reshape is None:
            return tensor
        batch = shape[:1] if self.batched else ()
        return tensor.reshape(batch + spec.undo_reshape(shape[len(batch) :]))
