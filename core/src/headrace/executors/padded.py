"""Models whose inputs are padded to one of a few sizes. The padding is cut off the outputs again.

An instance that takes rows gets the batch as tensors of those sizes. An instance that gets each request by itself gets
each one padded, and one more request for the missing rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.backends.base import Instance
from headrace.config.padding import AxisPad, PaddingRules
from headrace.errors import BackendError
from headrace.executors.output_schema import OutputSchema
from headrace.executors.runner import LATER, AnswerSink, Returned, RowsRunner, Runner, part_of_rows
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.tensor import BytesTensor, Tensor, as_tensor, concatenate
from headrace.messages.ticket import Padding, Ticket
from headrace.telemetry.executions import BatchTimes


class PaddedRunner(RowsRunner):
    """Pads the inputs of a batch to the sizes of ``rules``, and cuts the outputs. For `headrace.Instance`."""

    def __init__(self, schema: OutputSchema, instance: Instance, rules: PaddingRules) -> None:
        super().__init__(schema, instance)
        self._rules = rules
        self._stack = self._stack_padded

    def _stack_padded(self, batch: Sequence[Ticket]) -> Mapping[str, Tensor]:
        return padded_inputs(self._rules, batch, self._rules.rows(sum([ticket.rows for ticket in batch])))

    def _checked(self, results: Mapping[str, object], rows: int, requested: set[str] | None) -> dict[str, Tensor]:
        outputs = super()._checked(results, self._rules.rows(rows), requested)
        if not self._rules.batched:
            return outputs
        return {name: part_of_rows(tensor, 0, rows) for name, tensor in outputs.items()}

    def _split(self, batch: Sequence[Ticket], results: Mapping[str, object]) -> list[Answer]:
        answers = super()._split(batch, results)
        for ticket, answer in zip(batch, answers, strict=True):
            if isinstance(answer, InferResponse):
                answer.outputs = cut_outputs(self._rules, self.schema.name, answer.outputs, ticket.request)
        return answers


class PaddedRequests(Runner):
    """Pads each request, and cuts every answer to it. ``inner`` drives the instance. For the other kinds of instance.

    If the batch needs more rows, its last request is `Padding`, which has no caller. This is an `AnswerSink` too: late
    answers of ``inner`` pass through it.
    """

    def __init__(self, inner: Runner, rules: PaddingRules) -> None:
        super().__init__(inner.schema)
        self._inner, self._rules = inner, rules
        #: The unpadded request of each ticket without a last answer.
        self._requests: dict[Ticket, InferRequest] = {}

    def connect(self, sink: AnswerSink) -> None:
        self.sink = sink
        self._inner.connect(self)

    @property
    def unanswered(self) -> Sequence[Ticket]:
        return self._inner.unanswered

    def run(self, batch: Sequence[Ticket]) -> tuple[Sequence[Returned], BatchTimes]:
        for ticket in batch:
            self._requests[ticket] = request = ticket.request
            ticket.request = request.with_inputs(padded_inputs(self._rules, [ticket], ticket.rows))
        returned, times = self._inner.run([*batch, *self._missing(batch)])
        answers = [
            answer if answer is LATER else self._cut(ticket, answer, True)
            for ticket, answer in zip(batch, returned, strict=False)
        ]
        return answers, times

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        if not isinstance(ticket, Padding):
            self.sink.send(ticket, self._cut(ticket, answer, final), final)
        elif not final:
            ticket.read()  # else the model would wait until it is read

    def _missing(self, batch: Sequence[Ticket]) -> Iterator[Ticket]:
        """Yield the request that fills ``batch``, padded already, up to a bucket of rows. Yield nothing if it is
        full."""
        rows = sum(ticket.rows for ticket in batch)
        missing, first = self._rules.rows(rows) - rows, batch[0].request
        if missing:
            inputs: dict[str, Tensor] = {}
            for name, tensor in first.inputs.items():
                empty = _empty(self._rules, name, tensor, (missing, *tensor.shape[1:]))  # type: ignore[arg-type]
                inputs[name] = as_tensor(empty)
            yield Padding(first.model_name, inputs, missing)

    def close(self) -> None:
        self._inner.close()

    def _cut(self, ticket: Ticket, answer: Answer, final: bool) -> Answer:
        request = self._requests.pop(ticket, None) if final else self._requests.get(ticket)
        if request is None or not isinstance(answer, InferResponse):
            return answer
        outputs = {name: as_tensor(value) for name, value in answer.outputs.items()}
        try:
            return replace(answer, outputs=cut_outputs(self._rules, self.schema.name, outputs, request))
        except BackendError as error:
            return error


def padded_inputs(rules: PaddingRules, batch: Sequence[Ticket], rows: int) -> dict[str, Tensor]:
    """Return the inputs of ``batch``, row under row, padded to ``rows`` and to the sizes of ``rules``.

    The inputs that the server computes are added. A tensor that has its size already is not copied.
    """
    first = batch[0].request.inputs
    filled: dict[str, Tensor] = {}
    for name in first:
        tensors: list[Tensor] = [ticket.request.inputs[name] for ticket in batch]  # type: ignore[misc]
        shape = rules.shape(name, tensors[0].shape)
        filled[name] = _filled(rules, name, tensors, (rows, *shape[1:]) if rules.batched else shape)
    for pad in rules.pads:
        if pad.name in first and (pad.length or pad.mask):
            filled.update(_made(rules, pad, batch, rows))
    return filled


def _made(rules: PaddingRules, pad: AxisPad, batch: Sequence[Ticket], rows: int) -> dict[str, Tensor]:
    axis = pad.axis + rules.batched
    sizes = [ticket.request.inputs[pad.name].shape[axis] for ticket in batch]
    lengths = np.zeros(rows, np.int64)
    lengths[: sum(ticket.rows for ticket in batch)] = np.repeat(sizes, [ticket.rows for ticket in batch])
    made: dict[str, Tensor] = {}
    if pad.length is not None:
        made[pad.length.name] = lengths.astype(pad.length.datatype.numpy)
    if pad.mask is not None:
        there = np.arange(pad.bucket(sizes[0])) < lengths[:, None]
        made[pad.mask.name] = there.astype(pad.mask.datatype.numpy)
    return made


def _filled(rules: PaddingRules, name: str, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return ``tensors`` of input ``name``, one under the other, as one tensor of ``shape``."""
    if len(tensors) == 1 and tensors[0].shape == shape:
        return tensors[0]
    if isinstance(tensors[0], BytesTensor) and name not in rules.by_input:
        missing = (shape[0] - sum(tensor.shape[0] for tensor in tensors), *shape[1:])
        return concatenate([*tensors, BytesTensor(bytes(4 * prod(missing)), missing)])
    filled = _empty(rules, name, tensors[0], shape)
    begin = 0
    for tensor in tensors:
        place = tuple(map(slice, tensor.shape))
        if rules.batched:
            end = begin + tensor.shape[0]
            place = (slice(begin, end), *place[1:])
            begin = end
        filled[place] = tensor.to_objects() if isinstance(tensor, BytesTensor) else tensor
    return BytesTensor.from_objects(filled) if isinstance(tensors[0], BytesTensor) else filled


def _empty(rules: PaddingRules, name: str, like: Tensor, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return the padding of input ``name``, with the type of ``like``; strings as objects."""
    pads = rules.by_input.get(name)
    if isinstance(like, BytesTensor):
        return np.full(shape, str(pads[0].value).encode() if pads else b"", object)
    value = pads[0].value if pads else 0
    return np.full(shape, value, like.dtype) if value else np.zeros(shape, like.dtype)


def cut_outputs(
    rules: PaddingRules, model: str, outputs: Mapping[str, Tensor], request: InferRequest
) -> dict[str, Tensor]:
    """Return ``outputs`` of ``model`` without the padding. ``request`` is the unpadded request.

    The results are views, except strings. Raises `BackendError` for an output that should follow an input's size and
    does not.
    """
    return {
        name: _cut(rules, model, name, tensor, request) if name in rules.cuts else tensor
        for name, tensor in outputs.items()
    }


def _cut(rules: PaddingRules, model: str, name: str, tensor: Tensor, request: InferRequest) -> Tensor:
    place = [slice(None)] * len(tensor.shape)
    for cut in rules.cuts[name]:
        source = request.inputs.get(cut.pad.name)
        if source is None:  # an optional input, which the request lacks
            continue
        axis, size = cut.axis + rules.batched, source.shape[cut.pad.axis + rules.batched]
        bucket = cut.pad.bucket(size)
        if axis < len(place) and tensor.shape[axis] == bucket:
            place[axis] = slice(size)
        elif cut.must:
            raise BackendError(
                f"model '{model}': output '{name}' has shape {list(tensor.shape)}, but its axis {cut.axis} is to "
                f"follow input '{cut.pad.name}', which was padded to {bucket}"
            )
    if isinstance(tensor, BytesTensor):
        return BytesTensor.from_objects(tensor.to_objects()[tuple(place)])
    return tensor[tuple(place)]
