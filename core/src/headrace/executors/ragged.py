"""Ragged batches: inputs with different shapes per request, concatenated as one row of elements.

The server adds inputs that say where each request begins. Also shape tensors, which a batch has only once. Source:
docs/spec/behaviours.md sections 3.3 and 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.backends.base import Instance
from headrace.errors import BackendError, InvalidArgument
from headrace.executors.output_schema import OutputSchema
from headrace.executors.runner import RowsRunner, part_of_rows, requested_names, split_rows
from headrace.messages.response import Answer, InferResponse
from headrace.messages.tensor import Tensor, as_tensor, concatenate
from headrace.messages.ticket import Ticket

Shapes: TypeAlias = Sequence[tuple[int, ...]]


def _element_counts(shapes: Shapes) -> list[int]:
    return [prod(shape) for shape in shapes]


def _ends(shapes: Shapes) -> list[int]:
    return list(accumulate(_element_counts(shapes)))


def _item_shapes(shapes: Shapes) -> npt.NDArray[np.int64]:
    """Return the shape of each row. A request may have several rows."""
    items = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(items, np.int64).reshape(len(items), len(shapes[0]) - 1)


#: Computes a batch input from the shapes of its source input in all requests, first axes included.
_VALUES: Mapping[str, Callable[[Shapes], Any]] = {
    "BATCH_ELEMENT_COUNT": _element_counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _ends,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: [0, *_ends(shapes)],
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(max(_element_counts(shapes))),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: _item_shapes(shapes).ravel(),
}
_TYPES = {"TYPE_INT32": np.dtype(np.int32), "TYPE_FP32": np.dtype(np.float32)}


@dataclass(frozen=True, slots=True)
class BatchInputRule:
    """The inputs ``targets``, which the server computes from the shapes of the input ``source``."""

    targets: tuple[str, ...]
    source: str
    values: Callable[[Shapes], Any]
    numpy: np.dtype[Any]

    def make(self, shapes: Shapes) -> npt.NDArray[Any]:
        """Return the tensor for a batch in which the source has ``shapes``."""
        return np.asarray(self.values(shapes), self.numpy)


@dataclass(frozen=True, slots=True)
class RaggedLayout:
    """The settings of a config for ragged batches. ``scattered`` maps an output to the input whose shapes it follows.

    ``whole`` are inputs and outputs without rows: one tensor for all requests of a batch.
    """

    ragged: frozenset[str]
    made: tuple[BatchInputRule, ...]
    scattered: Mapping[str, str]
    whole: frozenset[str] = frozenset()

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> RaggedLayout | None:
        """Return the layout of a config in the form of the ``/config`` endpoint, or None without ragged batches."""
        ragged = frozenset(io["name"] for io in config.get("input", ()) if io.get("allow_ragged_batch"))
        made = tuple(
            BatchInputRule(
                tuple(entry["target_name"]),
                entry["source_input"][0],
                _VALUES[entry["kind"]],
                _TYPES[entry["data_type"]],
            )
            for entry in config.get("batch_input", ())
        )
        scattered = {
            target: entry["source_input"][0]
            for entry in config.get("batch_output", ())
            for target in entry["target_name"]
        }
        is_batched = config.get("max_batch_size", 0) > 0
        tensors = (*config.get("input", ()), *config.get("output", ()))
        whole = frozenset(io["name"] for io in tensors if is_batched and io.get("is_shape_tensor"))
        return cls(ragged, made, scattered, whole) if ragged or made or scattered or whole else None

    def stack(self, batch: Sequence[Ticket]) -> Mapping[str, Tensor]:
        """Return the inputs of all requests: ragged ones as one row of elements, others row under row.

        The inputs that the server computes are added.
        """
        stacked: dict[str, Tensor] = {}
        for name in batch[0].request.inputs:
            tensors: list[Tensor] = [ticket.request.inputs[name] for ticket in batch]  # type: ignore[misc]
            if name in self.ragged:
                tensors = [tensor.reshape((prod(tensor.shape),)) for tensor in tensors]
            is_one = len(tensors) == 1 or name in self.whole
            stacked[name] = tensors[0] if is_one else concatenate(tensors)
        for rule in self.made:
            tensor = rule.make(shapes_of(rule.source, batch))
            stacked.update(dict.fromkeys(rule.targets, tensor))
        return stacked


class RaggedRunner(RowsRunner):
    """Runs a `headrace.Instance` of a model with ragged batches."""

    def __init__(self, schema: OutputSchema, instance: Instance, layout: RaggedLayout) -> None:
        super().__init__(schema, instance)
        self._layout = layout
        self._stack = layout.stack
        apart = layout.scattered.keys() | layout.whole
        self._in_rows = {name: spec for name, spec in schema.outputs.items() if name not in apart}
        self._whole = layout.whole & schema.outputs.keys()

    def _split(self, batch: Sequence[Ticket], results: Mapping[str, object]) -> list[Answer]:
        requested = requested_names(batch)
        rows = [ticket.rows for ticket in batch]
        in_rows = self._checked(results, sum(rows), requested)
        pieces = {name: split_rows(tensor, rows) for name, tensor in in_rows.items()}
        for name, source in self._layout.scattered.items():
            if name in results or requested is None or name in requested:
                pieces[name] = self._scatter(name, source, batch, results)
        for name in self._whole:
            if name in results:
                pieces[name] = [as_tensor(results[name])] * len(batch)  # type: ignore[arg-type]
            elif requested is None or name in requested:
                raise BackendError(f"model '{self.schema.name}': the backend returned no output '{name}'")
        answers: list[Answer] = []
        for number, ticket in enumerate(batch):
            names = [name for name in ticket.request.outputs or self.schema.outputs if name in pieces]
            outputs = {name: pieces[name][number] for name in names}
            answers.append(
                InferResponse(outputs, self.parameters, self.schema.name, self.schema.version, ticket.request.id)
            )
        return answers

    def _scatter(
        self, name: str, source: str, batch: Sequence[Ticket], results: Mapping[str, object]
    ) -> Sequence[Tensor]:
        """Return the part of output ``name`` of each request.

        Its variable dims are those of input ``source`` on the same axes. It gets as many elements as its shape has.
        """
        if name not in results:
            raise BackendError(
                f"model '{self.schema.name}': the backend returned no output '{name}', only {sorted(results)}"
            )
        spec, tensor = self.schema.outputs[name], as_tensor(results[name])  # type: ignore[arg-type]
        dims = (-1, *spec.backend_dims) if self.schema.batched else spec.backend_dims
        shapes = [self._filled(name, dims, source, shape) for shape in shapes_of(source, batch)]
        ends = [0, *_ends(shapes)]
        flat = tensor.reshape((prod(tensor.shape),))
        if flat.shape[0] < ends[-1]:
            raise BackendError(
                f"model '{self.schema.name}': output '{name}' has {flat.shape[0]} elements, but by input '{source}' "
                f"the requests of the batch take {ends[-1]}"
            )
        return [
            self.schema.accept(spec, part_of_rows(flat, begin, end).reshape(shape), ticket.rows)
            for ticket, shape, begin, end in zip(batch, shapes, ends, ends[1:], strict=False)
        ]

    def _filled(self, name: str, dims: tuple[int, ...], source: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if any(dim == -1 and axis >= len(shape) for axis, dim in enumerate(dims)):
            raise BackendError(
                f"model '{self.schema.name}': output '{name}' of {len(dims)} dims is to follow input '{source}', "
                f"which has {len(shape)}"
            )
        return tuple(shape[axis] if dim == -1 else dim for axis, dim in enumerate(dims))


def shapes_of(source: str, batch: Sequence[Ticket]) -> Shapes:
    """Return the shape of input ``source`` in each request. Raises `InvalidArgument` if a request lacks it."""
    for ticket in batch:
        if source not in ticket.request.inputs:
            raise InvalidArgument(
                f"{ticket.request.log_id}input '{source}' is missing, whose shape a batch input or output is made of"
            )
    return [ticket.request.inputs[source].shape for ticket in batch]
