"""Which requests begin a sequence, and what those are told that do not, in Triton's words and order."""

from __future__ import annotations

from collections.abc import Container
from itertools import count

from headrace import InferRequest, InvalidArgument, Ticket, Unsupported
from headrace_sequence.added_inputs import AddedInputs

#: Of an id that is a string.
MAX_ID_BYTES = 128


class Admission:
    """The rules of ``model``, which is told of sequences by ``inputs``."""

    def __init__(self, model: str, inputs: AddedInputs) -> None:
        self._model, self._inputs = model, inputs
        #: The ids of sequences whose callers have named none.
        self._numbers = count(1)

    def check(self, ticket: Ticket) -> None:
        """Raise `InvalidArgument` or `Unsupported` if the request of ``ticket`` begins no sequence."""
        request, key = ticket.request, ticket.request.sequence_id
        if isinstance(key, str) and len(key.encode(errors="replace")) > MAX_ID_BYTES:
            raise Unsupported(f"string correlation ID cannot be longer than {MAX_ID_BYTES} characters")
        to = f"to model '{self._model}' must specify"
        if ticket.rows != 1:
            raise InvalidArgument(f"inference request {to} batch-size 1 due to requirements of sequence batcher")
        if not key:
            raise InvalidArgument(f"inference request {to} a non-zero or non-empty correlation ID")
        if not request.sequence_start:
            raise self._not_started(request)
        self._inputs.check(request)

    def named(self, request: InferRequest, live: Container[int | str]) -> InferRequest:
        """``request`` of an iterative model, of which each is a sequence: with an id that is none of ``live`` if it has
        none. Raises `InvalidArgument` if it has one, and does not begin it."""
        if not request.sequence_id:
            numbers = map(str, self._numbers) if self._inputs.takes_text else self._numbers
            free = next(number for number in numbers if number not in live)
            return request.with_sequence(free, True, request.sequence_end)
        if not request.sequence_start:
            raise self._not_started(request)
        return request

    def _not_started(self, request: InferRequest) -> InvalidArgument:
        return InvalidArgument(
            f"inference request for sequence {request.sequence_id} to model '{self._model}' must specify the START "
            "flag on the first request of the sequence"
        )
