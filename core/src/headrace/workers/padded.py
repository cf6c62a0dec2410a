"""Rung 1 of a model whose inputs are filled up to one of a few sizes: what runs is padded, answers are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from headrace.backends.base import Instance
from headrace.config.padding import AxisCut, PaddingRules
from headrace.errors import BackendError
from headrace.messages.response import Answer
from headrace.messages.tensor import BytesTensor, Tensor, concatenate
from headrace.messages.ticket import Ticket
from headrace.workers.output_schema import OutputSchema
from headrace.workers.runner import RowsRunner, part_of_rows, wanted_of


class PaddedRunner(RowsRunner):
    """Stacks the inputs of a batch into tensors of the sizes of ``rules``, and cuts outputs to what requests asked."""

    def __init__(self, schema: OutputSchema, instance: Instance, rules: PaddingRules) -> None:
        super().__init__(schema, instance)
        self._rules = rules
        self._stack = self._stack_padded

    def _stack_padded(self, batch: Sequence[Ticket]) -> Mapping[str, Tensor]:
        rules, first = self._rules, batch[0].request.inputs
        rows = sum([ticket.rows for ticket in batch])
        total = rules.rows(rows) if rules.batched else rows
        stacked: dict[str, Tensor] = {}
        for name in first:
            tensors: list[Tensor] = [ticket.request.inputs[name] for ticket in batch]  # type: ignore[misc]
            shape = rules.shape(name, tensors[0].shape)
            if rules.batched:
                shape = (total, *shape[1:])
            stacked[name] = self._filled(name, tensors, shape)
        for pad in rules.pads:
            if pad.name not in first or (pad.length is None and pad.mask is None):
                continue
            axis = pad.axis + rules.batched
            lengths = np.zeros(total, np.int64)
            lengths[:rows] = np.repeat(
                [ticket.request.inputs[pad.name].shape[axis] for ticket in batch], [ticket.rows for ticket in batch]
            )
            if pad.length is not None:
                stacked[pad.length.name] = lengths.astype(pad.length.datatype.numpy)
            if pad.mask is not None:
                there = np.arange(stacked[pad.name].shape[axis]) < lengths[:, None]
                stacked[pad.mask.name] = there.astype(pad.mask.datatype.numpy)
        return stacked

    def _filled(self, name: str, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """``tensors``, row under row, within a tensor of ``shape``; one that has that shape already, uncopied."""
        if len(tensors) == 1 and tensors[0].shape == shape:
            return tensors[0]
        if isinstance(tensors[0], BytesTensor):
            missing = (shape[0] - sum(tensor.shape[0] for tensor in tensors), *shape[1:])
            return concatenate([*tensors, BytesTensor(bytes(4 * prod(missing)), missing)])
        pads = self._rules.by_input.get(name)
        value = pads[0].value if pads else 0
        dtype = tensors[0].dtype
        filled = np.full(shape, value, dtype) if value else np.zeros(shape, dtype)
        begin = 0
        for tensor in tensors:
            place = tuple(map(slice, tensor.shape))
            if self._rules.batched:
                end = begin + tensor.shape[0]
                place = (slice(begin, end), *place[1:])
                begin = end
            filled[place] = tensor
        return filled

    def _split(self, batch: Sequence[Ticket], results: Mapping[str, object]) -> list[Answer]:
        rules = self._rules
        rows = sum([ticket.rows for ticket in batch])
        outputs = self._checked(results, rules.rows(rows) if rules.batched else rows, wanted_of(batch))
        answers: list[Answer] = []
        begin = 0
        for ticket in batch:
            request, end = ticket.request, begin + ticket.rows
            parts = {}
            for name in request.outputs or outputs:
                part = part_of_rows(outputs[name], begin, end) if rules.batched else outputs[name]
                parts[name] = self._cut(name, part, ticket, rules.cuts[name]) if name in rules.cuts else part
            answers.append(self.respond(request, parts))
            begin = end
        return answers

    def _cut(self, name: str, tensor: Tensor, ticket: Ticket, cuts: Sequence[AxisCut]) -> Tensor:
        """``tensor`` without what follows from the padding of inputs. A view, unless it is of strings."""
        place = [slice(None)] * len(tensor.shape)
        for cut in cuts:
            source = ticket.request.inputs.get(cut.pad.name)
            if source is None:  # an optional input that was left out
                continue
            axis, size = cut.axis + self._rules.batched, source.shape[cut.pad.axis + self._rules.batched]
            bucket = cut.pad.bucket(size)
            if axis < len(place) and tensor.shape[axis] == bucket:
                place[axis] = slice(size)
            elif cut.must:
                raise BackendError(
                    f"model '{self.schema.name}': output '{name}' has shape {list(tensor.shape)}, but its axis "
                    f"{cut.axis} is to follow input '{cut.pad.name}', which was padded to {bucket}"
                )
        if isinstance(tensor, BytesTensor):
            return BytesTensor.from_objects(tensor.to_objects()[tuple(place)])
        return tensor[tuple(place)]
