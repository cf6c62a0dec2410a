"""The description of a plan file: its inputs and outputs, and the optimisation profiles that limit their shapes.

`headrace_tensorrt.plan_engine` reads it from an engine. The rules are those of docs/spec/behaviours.md section 10.5,
and the texts of errors those of Triton's TensorRT backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from headrace import DataType, InvalidArgument
from headrace_engines import Graph, GraphTensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """One input or output of a plan.

    - ``datatype``: None if the protocol lacks the type; ``type`` is TensorRT's name of it.
    - ``shape``: with the batch axis; -1 is any size.
    - ``is_shape_tensor``: its values are shapes. They are in the host's memory (``is_on_host``).
    - ``format``: a description of a layout that is not linear; else empty. Such a layout divides ``vector_axis`` into
      vectors of ``vector_length`` elements, and pads the last one.
    """

    name: str
    is_input: bool
    datatype: DataType | None
    type: str
    shape: Shape
    is_shape_tensor: bool = False
    is_on_host: bool = False
    format: str = ""
    vector_axis: int = -1
    vector_length: int = 1

    def size_bytes(self, shape: Shape) -> int:
        """Return the bytes of a tensor of ``shape``, with the padding of its last vectors."""
        assert self.datatype is not None
        if self.vector_axis >= 0 and self.vector_length > 1:
            vectors = -(-shape[self.vector_axis] // self.vector_length)
            shape = (*shape[: self.vector_axis], vectors * self.vector_length, *shape[self.vector_axis + 1 :])
        return prod(shape) * self.datatype.itemsize

    @property
    def is_padded(self) -> bool:
        """True if its layout may take more memory than its elements."""
        length = self.shape[self.vector_axis] if self.vector_axis >= 0 else 0
        return self.vector_length > 1 and (length < 0 or length % self.vector_length != 0)


def graph_of(tensors: Sequence[PlanTensor]) -> Graph:
    """Return the graph for the completion and the check of a config."""
    infos = {
        tensor.name: GraphTensor(
            tensor.name, tensor.datatype, tensor.type, tensor.shape, is_shape_tensor=tensor.is_shape_tensor
        )
        for tensor in tensors
    }
    return Graph(
        {tensor.name: infos[tensor.name] for tensor in tensors if tensor.is_input},
        {tensor.name: infos[tensor.name] for tensor in tensors if not tensor.is_input},
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest, the optimal and the largest shape of one input, or values of a shape tensor."""

    least: Shape
    best: Shape
    most: Shape

    def distance(self, shape: Shape) -> int:
        """Return the distance of ``shape`` from the optimal one. Raises `ValueError`, in Triton's words, outside of the
        bounds."""
        if len(shape) != len(self.most):
            raise ValueError(f"model expected {len(self.most)} dimensions but received {len(shape)} dimensions")
        for axis, (least, got, most) in enumerate(zip(self.least, shape, self.most, strict=True)):
            if not least <= got <= most:
                raise ValueError(
                    f"model expected the shape of dimension {axis} to be between {least} and {most} but received {got}"
                )
        return sum(abs(got - best) for got, best in zip(shape, self.best, strict=True))

    def value_distance(self, values: Shape) -> int:
        """Return the `distance` of the values of a shape tensor."""
        if len(values) != len(self.most):
            raise ValueError(
                f"mismatch between the number of shape values. Expecting {len(self.most)}. Got {len(values)}"
            )
        for index, (least, got, most) in enumerate(zip(self.least, values, self.most, strict=True)):
            if not least <= got <= most:
                raise ValueError(
                    f"The shape value at index {index} is expected to be in range from {least} to {most}, Got: {got}"
                )
        return sum(abs(got - best) for got, best in zip(values, self.best, strict=True))


@dataclass(frozen=True, slots=True)
class Profile:
    """One optimisation profile: the bounds of every input's shape, and of the values of its shape tensors."""

    index: int
    shapes: Mapping[str, Bounds]
    values: Mapping[str, Bounds]

    @property
    def max_rows(self) -> int:
        """The largest batch: the minimum of the largest first axes of the inputs, without shape tensors."""
        return min((bounds.most[0] for bounds in self._batched() if bounds.most), default=1)

    def _batched(self) -> list[Bounds]:
        return [bounds for name, bounds in self.shapes.items() if name not in self.values]

    def distance(self, shapes: Mapping[str, Shape], values: Mapping[str, Shape], instance: str) -> int:
        """Return the distance of the inputs of an execution from the optimum of this profile.

        Raises `InvalidArgument`, in Triton's words, with the input outside of its bounds.
        """
        total = 0
        try:
            for name, shape in shapes.items():
                total += self.shapes[name].distance(shape)
            for name, elements in values.items():
                total += self.values[name].value_distance(elements)
        except ValueError as error:
            raise InvalidArgument(
                f"request specifies invalid shape for input '{name}' for {instance}. Error details: {error}"
            ) from None
        return total


def choose(
    profiles: Sequence[Profile], shapes: Mapping[str, Shape], values: Mapping[str, Shape], instance: str
) -> Profile:
    """Return the profile nearest to the inputs; of several, the first. Raises the `InvalidArgument` of the first
    profile if the inputs are outside of the bounds of all.
    """
    chosen, nearest = None, -1
    reason: InvalidArgument | None = None
    for profile in profiles:
        try:
            distance = profile.distance(shapes, values, instance)
        except InvalidArgument as error:
            reason = reason or error
            continue
        if chosen is None or distance < nearest:
            chosen, nearest = profile, distance
    if chosen is None:
        assert reason is not None
        raise reason
    return chosen
